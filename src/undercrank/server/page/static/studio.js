// The studio: what is asked for on the left, what becomes of it on the right.

import { get, post } from "./api.js";
import { showClip } from "./clip.js";
import { $, say } from "./dom.js";
import { takeFiles } from "./drop.js";
import { makeForm } from "./form.js";
import { makeGallery } from "./gallery.js";
import { planFor } from "./plan.js";
import { follow } from "./running.js";

const [models, levers] = (await Promise.all([get("/v1/models"), get("/v1/levers")])).map((answer) => answer.data);
const form = makeForm({ models, levers, changed: () => planFor(form) });
const gallery = makeGallery({ open: (video) => showClip(video, { restore, deleted: gallery.drop }), restore });
const running = follow({ ended: gallery.add, gone: gallery.drop });

function restore(request, { master = false } = {}) {
  const lost = form.fill(request, { master });
  scrollTo({ top: 0 });
  form.element.prompt.focus();
  say(lost || "Settings restored");
  if (lost) form.problem(lost);
}

async function ask(event) {
  event.preventDefault();
  if (form.lacks()) return form.problem(form.lacks(), "input_reference");
  const button = form.element.querySelector("[type=submit]");
  button.disabled = true;
  form.problem(null);
  try {
    running.add(await post("/v1/videos", form.body()));
    say("The clip is in the queue");
    if (matchMedia("(max-width: 60rem)").matches) $("running-part").scrollIntoView(); // else it lies beside the form
  } catch (error) {
    form.problem(error.message, error.param);
  } finally {
    button.disabled = false;
  }
  return undefined;
}

form.element.addEventListener("submit", ask);
form.element.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.element.requestSubmit();
});
$("sign-out")?.addEventListener("click", async () => {
  await post("/logout");
  location.reload();
});
takeFiles({ restore, picture: form.takePicture, problem: form.problem });
form.recall();
document.documentElement.dataset.ready = "yes";
await gallery.load();
