// The gallery: clips that are over, newest first, as the server keeps them.

import { content, get } from "./api.js";
import { $, h } from "./dom.js";
import { facts, promise, seconds } from "./words.js";

const PAGE = 24;
const OVER = new Set(["completed", "failed", "cancelled"]);
const still = matchMedia("(prefers-reduced-motion: reduce)");

export function makeGallery({ open, restore }) {
  const clips = new Map();
  let picked = [];
  let more = true;
  let last = null;

  async function load(limit = PAGE) {
    const page = await get(`/v1/videos?limit=${limit}${last ? `&after=${encodeURIComponent(last)}` : ""}`);
    for (const video of page.data) if (OVER.has(video.status)) put(video, "append");
    [more, last] = [page.has_more, page.last_id ?? last];
    show();
  }

  async function loadAll() {
    while (more) await load(100);
  }

  function put(video, way) {
    clips.get(video.id)?.element.remove();
    const element = card(video);
    clips.set(video.id, { video, element, text: `${video.prompt} ${facts(video)} ${video.fidelity} ${video.status}`.toLowerCase() });
    $("gallery")[way](element);
  }

  function add(video, { focus = false } = {}) {
    put(video, "prepend");
    show();
    if (focus) clips.get(video.id).element.querySelector("button").focus();
  }

  function drop(id) {
    clips.get(id)?.element.remove();
    clips.delete(id);
    picked = picked.filter((each) => each !== id);
    show();
  }

  function show() {
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    let seen = 0;
    for (const { element, text } of clips.values()) {
      element.hidden = !words.every((word) => text.includes(word));
      seen += element.hidden ? 0 : 1;
    }
    $("gallery-empty").hidden = clips.size > 0;
    $("gallery-count").textContent = clips.size ? (words.length ? `${seen} of ${clips.size}` : `${clips.size}${more ? "+" : ""}`) : "";
    $("more").hidden = !more;
    showPicked();
  }

  function card(video) {
    const done = video.status === "completed";
    return h("li", { class: "card", "data-id": video.id, "data-status": video.status },
      h("button", { type: "button", class: "open", "aria-label": `Open: ${video.prompt || "clip"}`, click: () => open(clips.get(video.id).video) },
        done ? picture(video) : h("span", { class: "why" }, video.status === "failed" ? `Failed: ${video.error?.message ?? ""}` : "Cancelled")),
      h("div", { class: "card-body" },
        h("p", { class: "prompt" }, video.prompt),
        h("p", { class: "card-facts" }, facts(video)),
        done ? h("p", { class: "card-facts" }, [promise(video.promise), video.inference_time_s && seconds(video.inference_time_s)].filter(Boolean).join(" \u00b7 ")) : null),
      h("div", { class: "card-acts" },
        h("button", { type: "button", class: "quiet restore", title: "Take its settings", click: () => restore(video.request) }, "Restore"),
        done ? h("button", { type: "button", class: "quiet pick", "aria-pressed": "false", click: () => pick(video.id) }, "Compare") : null,
        done ? h("a", { class: "button quiet last", href: content(video.id, "video"), download: "", "aria-label": `Download, seed ${video.seed}`, title: "Download" }, "\u2193") : null));
  }

  function picture(video) {
    const rest = content(video.id, "thumbnail");
    const image = h("img", { src: rest, alt: "", loading: "lazy", decoding: "async" });
    const move = () => { if (!still.matches) image.src = content(video.id, "preview"); };
    const stop = () => { image.src = rest; };
    image.addEventListener("pointerenter", move);
    image.addEventListener("pointerleave", stop);
    return image;
  }

  function pick(id) {
    picked = picked.includes(id) ? picked.filter((each) => each !== id) : [...picked, id].slice(-2);
    showPicked();
  }

  function showPicked() {
    for (const [id, { element }] of clips) {
      element.querySelector(".pick")?.setAttribute("aria-pressed", String(picked.includes(id)));
    }
    const [a, b] = picked;
    $("picked").hidden = !a;
    if (!a) return;
    $("picked").replaceChildren(
      h("span", {}, b ? "Two clips chosen" : "Choose one more"),
      b ? h("a", { class: "button primary", href: `/compare?a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}` }, "Compare") : "",
      h("button", { type: "button", class: "quiet", click: () => { picked = []; showPicked(); } }, "Clear"));
  }

  $("filter").addEventListener("input", async () => {
    show();
    await loadAll();
  });
  $("more").addEventListener("click", () => load());
  return { load, add, drop };
}
