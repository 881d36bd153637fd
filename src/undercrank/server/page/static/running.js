// Clips in the making: one stream of events for all of them, and a card for each with its steps, picture and stages.

import { content, get, post, video as path } from "./api.js";
import { $, h, s, say } from "./dom.js";
import { facts, seconds } from "./words.js";

const STAGES = ["load", "text", "denoise", "decode", "encode"];
const TITLES = { load: "Loading the model", text: "Reading the prompt", denoise: "Denoising", decode: "Decoding", encode: "Writing files", cancelling: "Stopping" };
const OVER = new Set(["completed", "failed", "cancelled"]);
const KINDS = ["queued", "started", "requeued", "stage", "progress", "step", "preview", "cancelling", "completed", "failed", "cancelled", "deleted"];

export function follow({ ended, gone }) {
  const cards = new Map();
  const over = new Set();
  const stream = new EventSource("/v1/events?since=living");
  stream.addEventListener("open", () => { $("lost").hidden = true; });
  stream.addEventListener("error", () => { $("lost").hidden = false; });
  addEventListener("pagehide", () => stream.close());
  for (const kind of KINDS) stream.addEventListener(kind, (event) => heard(kind, JSON.parse(event.data)));

  function add(video) {
    if (over.has(video.id) || OVER.has(video.status)) return null;
    if (!cards.has(video.id)) {
      const card = makeCard(video);
      cards.set(video.id, card);
      $("running").append(card.element);
    }
    tidy();
    return cards.get(video.id);
  }

  function drop(id) {
    over.add(id);
    cards.get(id)?.element.remove();
    cards.delete(id);
    tidy();
  }

  const tidy = () => { $("running-part").hidden = cards.size === 0; };

  async function heard(kind, data) {
    const { id } = data;
    if (kind === "deleted") {
      drop(id);
      gone(id);
    } else if (OVER.has(kind)) {
      await finish(id, kind);
    } else if (!over.has(id)) {
      if (!cards.has(id)) await learn(id);
      cards.get(id)?.heard(kind, data);
    }
  }

  /** A clip that another window or program asked for. */
  async function learn(id) {
    const video = await get(path(id)).catch(() => null);
    if (video) add(video);
  }

  async function finish(id, kind) {
    const hadFocus = cards.get(id)?.element.contains(document.activeElement);
    const video = await get(path(id)).catch(() => null);
    const known = over.has(id);
    drop(id);
    if (!video) return;
    ended(video, { focus: hadFocus });
    if (!known) say(kind === "completed" ? "The clip is done" : kind === "failed" ? `The clip failed: ${video.error?.message}` : "The clip was cancelled");
  }

  return { add };
}

function makeCard(video) {
  const look = h("div", { class: "look" }, "queued");
  const state = h("p", { class: "state" }, "In the queue");
  const bars = s("svg", { class: "steps", preserveAspectRatio: "none", "aria-hidden": true });
  const thread = h("i");
  const meter = h("div", { class: "thread", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": "Progress" }, thread);
  const stages = h("ol", { class: "stages" }, STAGES.map((stage) => h("li", { "data-stage": stage }, stage)));
  const cancel = h("button", { type: "button", class: "cancel", click: stop }, "Cancel");
  const element = h("li", { class: "job", "data-id": video.id, "aria-label": `In the making: ${video.prompt}` },
    look,
    h("div", { class: "job-body" },
      h("div", { class: "job-head" }, h("p", { class: "prompt" }, video.prompt), cancel),
      state, bars, meter, stages,
      h("p", { class: "card-facts" }, facts(video))));
  let stage = null;
  let stepMs = [];
  drawSteps(bars, stepMs, video.num_inference_steps);
  if (video.queue_position) state.textContent = `In the queue, ${video.queue_position} before it`;

  async function stop() {
    cancel.disabled = true;
    state.textContent = "Stopping ...";
    await post(`${path(video.id)}/cancel`).catch((error) => { state.textContent = error.message; });
  }

  function heard(kind, data) {
    if (kind === "queued") return;
    if (kind === "started" || kind === "requeued") {
      stepMs = [];
      state.textContent = kind === "started" ? "Started" : `Back in the queue: ${data.reason ?? "its worker stopped"}`;
      drawSteps(bars, stepMs, video.num_inference_steps);
    } else if (kind === "preview") {
      lookAgain(data.step);
    } else if (kind === "cancelling") {
      cancel.disabled = true;
      state.textContent = "Stopping ...";
    } else {
      if (kind === "step") {
        stepMs[data.step - 1] = data.step_ms ?? 1;
        drawSteps(bars, stepMs, data.total);
      }
      moved(kind === "step" ? "denoise" : (data.stage ?? stage), data);
    }
  }

  function moved(now, data) {
    if (now !== stage) {
      stage = now;
      const at = STAGES.indexOf(stage);
      for (const [i, item] of [...stages.children].entries()) {
        item.classList.toggle("done", i < at);
        i === at ? item.setAttribute("aria-current", "step") : item.removeAttribute("aria-current");
      }
    }
    if (data.progress !== undefined) {
      thread.style.width = `${data.progress}%`;
      meter.setAttribute("aria-valuenow", data.progress);
    }
    if (cancel.disabled) return;
    const part = data.component ? `: ${data.state} ${data.component.replaceAll("_", " ")}` : "";
    const step = data.step ? `, step ${data.step} of ${data.total}` : "";
    const left = data.eta_s ? `, ${seconds(data.eta_s)} left` : "";
    state.textContent = `${TITLES[stage] ?? "Started"}${part}${step}${left}`;
    say(state.textContent, 1500);
  }

  /** The newest picture; the one before stays until this one is here. */
  function lookAgain(step) {
    const next = new Image();
    next.alt = "Preview of the clip in the making";
    next.addEventListener("load", () => look.replaceChildren(next));
    next.src = `${content(video.id, "preview")}&step=${step}`;
  }

  return { element, heard };
}

/** A bar for each step, as high as it took long: skipped steps are seen at once. */
function drawSteps(svg, stepMs, total) {
  const longest = Math.max(1, ...stepMs.filter(Boolean));
  svg.setAttribute("viewBox", `0 0 ${total * 10} 100`);
  svg.replaceChildren(...Array.from({ length: total }, (_, i) => {
    const height = stepMs[i] ? Math.max(12, (100 * stepMs[i]) / longest) : 6;
    return s("rect", { class: stepMs[i] ? "done" : null, x: i * 10 + 1, y: 100 - height, width: 8, height });
  }));
}
