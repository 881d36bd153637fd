// Files that are dropped anywhere on the page: a clip gives its recipe, a picture is a first frame.

import { $ } from "./dom.js";
import { recipeOf } from "./recipe.js";

export function takeFiles({ restore, picture, problem }) {
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  let depth = 0;
  const over = (now) => {
    depth = Math.max(0, now);
    $("drop").hidden = depth === 0;
  };
  addEventListener("dragenter", (event) => hasFiles(event) && over(depth + 1));
  addEventListener("dragleave", (event) => hasFiles(event) && over(depth - 1));
  addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  addEventListener("drop", async (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    over(0);
    const { files } = event.dataTransfer;
    const [file] = files;
    if (!file) return;
    try {
      if (file.type.startsWith("image/")) problem(picture(files) || null);
      else restore((await recipeOf(file)).request);
    } catch (error) {
      problem(error.message);
    }
  });
}
