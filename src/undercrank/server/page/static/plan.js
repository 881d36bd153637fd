// What would run, how long and why, before anything is started: asked anew whenever the form comes to rest.

import { post } from "./api.js";
import { $, h } from "./dom.js";
import { bytes, promise, seconds } from "./words.js";

const REST_MS = 180;
let timer, asked;

export function planFor(form) {
  $("plan-body").classList.add("is-old");
  clearTimeout(timer);
  timer = setTimeout(() => ask(form), REST_MS);
}

async function ask(form) {
  asked?.abort();
  asked = new AbortController();
  const { signal } = asked;
  if (form.lacks()) return show(h("p", { class: "hint" }, form.lacks()));
  try {
    const answer = await post("/v1/plan", form.body(), { signal });
    form.problem(null);
    show(...planView(answer.plan));
    $("plan-line").textContent = inALine(answer.plan);
    return undefined;
  } catch (error) {
    if (signal.aborted) return undefined;
    form.problem(error.message, error.param);
    return show(h("p", { class: "hint" }, "There is no plan for these settings."));
  }
}

/** Beside the button, where it is in sight wherever the form was scrolled to. */
function inALine({ expected, promise: word }) {
  const time = expected.seconds === null ? "time unknown" : `about ${seconds(expected.seconds)}`;
  return `${time} \u00b7 ${bytes(expected.peak_bytes)} \u00b7 ${promise(word)}`;
}

function show(...content) {
  $("plan-line").textContent = "";
  $("plan-body").replaceChildren(...content);
  $("plan-body").classList.remove("is-old");
}

/** Figures, decisions and notes of a plan; also of one that ran. */
export function planView(plan) {
  const { expected, decisions, notes } = plan;
  const figures = [
    ["Time", seconds(expected.seconds), expected.seconds_basis],
    ["Memory", bytes(expected.peak_bytes), expected.memory_basis],
    ["Promise", promise(plan.promise), "the weakest of all that is on"],
  ];
  return [
    h("dl", { class: "figures" }, figures.map(([title, value, basis]) =>
      h("div", {}, h("dt", {}, title), h("dd", {}, value, h("small", {}, basis))))),
    decisionsView(decisions),
    notes.length ? h("ul", { class: "notes" }, notes.map((note) => h("li", {}, note))) : null,
  ].filter(Boolean);
}

export function decisionsView(decisions) {
  const engagedFirst = [...decisions].sort((a, b) => isOn(b) - isOn(a));
  return h("ul", { class: "levers" }, engagedFirst.map((decision) =>
    h("li", { class: isOn(decision) ? "on" : "off" },
      h("span", { class: "name" }, decision.lever, " ", h("span", { class: "chosen" }, chosen(decision))),
      h("span", { class: "promise" }, promise(decision.promise)),
      h("span", { class: "reason" }, decision.reason))));
}

const isOn = (decision) => Number(decision.status === "applied");
const chosen = ({ status, chosen: word }) => (status === "unsupported" ? "not here" : word);
