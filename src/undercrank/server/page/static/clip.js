// One clip: its film, its whole story, and what can be done with it.

import { content, remove, video as path } from "./api.js";
import { $, h } from "./dom.js";
import { decisionsView } from "./plan.js";
import { promise, seconds, size } from "./words.js";

export function showClip(video, { restore, deleted }) {
  const dialog = $("clip");
  const close = () => dialog.close();
  const done = video.status === "completed";
  dialog.replaceChildren(
    h("div", { class: "clip-head" },
      h("h2", { id: "clip-title" }, video.prompt || "Clip"),
      h("button", { type: "button", class: "quiet icon", "aria-label": "Close", click: close }, "\u00d7")),
    h("div", { class: "clip-body" },
      h("div", {}, done
        ? h("video", { src: content(video.id, "video"), poster: content(video.id, "thumbnail"), controls: true, loop: true, playsinline: true })
        : h("p", { class: "problem" }, video.error?.message ?? "This clip was cancelled."),
        video.notes.length ? h("ul", { class: "notes" }, video.notes.map((note) => h("li", {}, note))) : null),
      h("div", {}, factsOf(video), video.plan ? decisionsView(video.plan.decisions) : null)),
    h("div", { class: "acts" },
      h("button", { type: "button", class: "primary", click: () => { close(); restore(video.request); } }, "Restore settings"),
      done ? h("a", { class: "button", href: content(video.id, "video"), download: "" }, "Download") : null,
      video.variants.includes("master") ? h("a", { class: "button", href: content(video.id, "master"), download: "" }, "Master") : null,
      done ? h("a", { class: "button", href: content(video.id, "report"), download: "" }, "Report") : null,
      done ? h("a", { class: "button", href: `/compare?a=${encodeURIComponent(video.id)}` }, "Compare") : null,
      deleteButton(async () => { await remove(path(video.id)); close(); deleted(video.id); })));
  dialog.addEventListener("close", () => dialog.querySelector("video")?.pause(), { once: true });
  dialog.showModal();
}

function factsOf(video) {
  const rows = [
    ["Model", video.model],
    ["Size", `${size(video)}, ${video.num_frames} frames, ${video.fps} fps`],
    ["Steps", `${video.num_inference_steps}, guidance ${video.guidance_scale}`],
    ["Seed", String(video.seed)],
    ["Negative", video.negative_prompt],
    ["Fidelity", `${video.fidelity}, promise ${promise(video.promise)}`],
    ["Time", video.inference_time_s && seconds(video.inference_time_s)],
    ["Peak memory", video.peak_memory_mb && `${Math.round(video.peak_memory_mb)} MiB`],
    ["Made", video.completed_at && new Date(video.completed_at * 1000).toLocaleString()],
    ["Id", video.id],
  ];
  return h("dl", { class: "facts" }, rows.filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** It asks once more, in place. */
function deleteButton(act) {
  const button = h("button", { type: "button", class: "quiet" }, "Delete");
  let sure = false;
  button.addEventListener("click", () => {
    if (sure) return act();
    sure = true;
    button.textContent = "Delete for good";
    setTimeout(() => { sure = false; button.textContent = "Delete"; }, 4000);
    return undefined;
  });
  return button;
}
