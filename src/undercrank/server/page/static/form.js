// The form: defaults of the model that is chosen, and the body of a request from what stands there.

import { $, h } from "./dom.js";
import { rate, seconds } from "./words.js";

const DRAFT = "draft";
const NUMBERS = ["num_frames", "num_inference_steps", "guidance_scale", "seed", "flow_shift", "guidance_scale_2"];
// What a knob may say besides auto and off, where that is a short list; all else is typed. The server has the last word.
const CHOICES = {
  transformer_cache: ["on", "magcache", "searched", "fbcache", "easycache", "mask"],
  transformer_cache_quality: ["quality", "balanced", "fast"],
  attention_backend: ["on", "cudnn", "flash", "efficient", "flash3", "flash4", "sage"],
  compile: ["on", "parity", "plain", "max"],
  transformer_quant: ["int8", "fp8", "fp8_ffn", "mxfp8", "nvfp4"],
  text_encoder_quant: ["int8", "fp8", "fp8_dynamic"],
  vae_quant: ["fp8"],
  offload: ["model", "group"],
};
const TYPED = new Set(["transformer_cache_threshold", "transformer_cache_budget", "transformer_cache_retention", "transformer_cache_mask"]);

export function makeForm({ models, levers, changed }) {
  const element = $("ask");
  const knobs = levers.flatMap((lever) => lever.knobs.map((name) => ({ name, lever })));
  const model = () => models.find((each) => each.id === element.model.value) ?? models[0];

  element.model.append(...models.map((each) => h("option", { value: each.id }, each.title)));
  $("knobs").append(...knobs.map(({ name, lever }) => knobField(name, lever)));

  function defaults() {
    const it = model();
    const sizes = [...new Set([`${it.width}x${it.height}`, ...it.trained_sizes.map((pair) => pair.join("x"))])];
    element.size.replaceChildren(
      ...sizes.map((each) => h("option", { value: each }, each.replace("x", " \u00d7 "))),
      h("option", { value: "other" }, "Other \u2026"),
    );
    Object.assign(element.width, { value: it.width, step: it.size_multiple });
    Object.assign(element.height, { value: it.height, step: it.size_multiple });
    Object.assign(element.num_frames, { value: it.num_frames, step: it.frame_step });
    element.num_inference_steps.value = it.num_inference_steps;
    element.guidance_scale.value = it.guidance_scale;
    element.fps.placeholder = it.fps;
    for (const name of ["fps", "flow_shift", "guidance_scale_2"]) element[name].value = "";
    element.negative_prompt.value = it.negative_prompt ?? "";
    $("model-note").textContent = it.note;
    $("picture").hidden = !it.takes_image;
  }

  function shown() {
    const it = model();
    for (const each of element.querySelectorAll(".other")) each.hidden = element.size.value !== "other";
    const length = (Number(element.num_frames.value) - 1) / rate(element.fps.value || it.fps);
    $("length").textContent = length > 0 ? seconds(length) : "";
    $("meaning").textContent = element.querySelector("[name=fidelity]:checked")?.dataset.meaning ?? "";
    const set = knobs.filter(({ name }) => !["", "auto"].includes(element[name].value)).length;
    $("advanced-count").textContent = set ? `${set} set` : "";
  }

  function fields() {
    const body = { prompt: element.prompt.value, model: model().id, fidelity: element.fidelity.value };
    const [width, height] = element.size.value === "other" ? [element.width.value, element.height.value] : element.size.value.split("x");
    Object.assign(body, { width, height, negative_prompt: element.negative_prompt.value });
    for (const name of [...NUMBERS, "fps"]) if (element[name].value !== "") body[name] = element[name].value;
    for (const { name } of knobs) if (!["", "auto"].includes(element[name].value)) body[name] = element[name].value;
    if (element.master.checked) body.master = "true";
    return body;
  }

  function body() {
    const picture = model().takes_image && element.input_reference.files[0];
    if (!picture) return { ...fields(), master: element.master.checked };
    const form = new FormData();
    for (const [name, value] of Object.entries(fields())) form.append(name, value);
    form.append("input_reference", picture);
    return form;
  }

  /** Take the settings of a request, as a recipe holds it. What cannot be taken is said. */
  function fill(request, { master = false } = {}) {
    const known = models.some((each) => each.id === request.model);
    if (known) element.model.value = request.model;
    defaults();
    element.prompt.value = request.prompt ?? "";
    if (request.negative_prompt !== null && request.negative_prompt !== undefined) element.negative_prompt.value = request.negative_prompt;
    fillSize(request);
    for (const name of NUMBERS) if (request[name] !== null && request[name] !== undefined) element[name].value = request[name];
    if (request.fps && request.fps !== model().fps) element.fps.value = request.fps;
    for (const each of element.querySelectorAll("[name=fidelity]")) each.checked = each.value === (request.fidelity ?? "faithful");
    const wishes = new Map(request.wishes ?? []);
    const lost = [...wishes.keys()].filter((name) => !knobs.some((each) => each.name === name));
    for (const { name } of knobs) setKnob(element[name], wishes.get(name));
    if (wishes.size) $("advanced").open = true;
    element.master.checked = master;
    touched();
    if (!known) return `The model ${request.model} is not served here: its settings were put on ${model().title}`;
    if (request.image) return "This clip began with a picture: choose it again";
    return lost.length ? `Not known here: ${lost.join(", ")}` : "";
  }

  function fillSize({ width, height }) {
    if (!width || !height) return;
    const named = [...element.size.options].some((option) => option.value === `${width}x${height}`);
    element.size.value = named ? `${width}x${height}` : "other";
    Object.assign(element.width, { value: width });
    Object.assign(element.height, { value: height });
  }

  function problem(message, param) {
    for (const each of element.querySelectorAll("[aria-invalid]")) each.removeAttribute("aria-invalid");
    $("problem").hidden = !message;
    $("problem").textContent = message ?? "";
    const hidden = { width: "size", height: "size" };
    const name = element.size.value === "other" ? param : (hidden[param] ?? param);
    const wrong = name && element.elements.namedItem(name);
    if (wrong instanceof Element) wrong.setAttribute("aria-invalid", "true");
  }

  function draft() {
    const wishes = knobs.map(({ name }) => [name, element[name].value]).filter(([, value]) => !["", "auto"].includes(value));
    return { ...fields(), wishes };
  }

  /** What stood here before the page was loaded again. */
  function recall() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(DRAFT));
      if (kept) return fill(kept);
    } catch { /* a draft of another version */ }
    defaults();
    return touched();
  }

  function touched() {
    shown();
    sessionStorage.setItem(DRAFT, JSON.stringify(draft()));
    changed();
  }

  function showPicture() {
    const [file] = element.input_reference.files;
    const shown = $("picture-shown");
    URL.revokeObjectURL(shown.src);
    shown.hidden = $("picture-out").hidden = !file;
    if (file) shown.src = URL.createObjectURL(file);
  }

  function takePicture(files) {
    if (!model().takes_image) return `${model().title} takes no picture`;
    element.input_reference.files = files;
    showPicture();
    touched();
    return "";
  }

  element.addEventListener("input", (event) => {
    if (event.target === element.model) {
      const { prompt } = element;
      const kept = prompt.value;
      defaults();
      prompt.value = kept;
    }
    if (event.target === element.input_reference) showPicture();
    touched();
  });
  $("new-seed").addEventListener("click", () => {
    element.seed.value = crypto.getRandomValues(new Uint32Array(1))[0];
    touched();
  });
  $("picture-out").addEventListener("click", () => {
    element.input_reference.value = "";
    showPicture();
    touched();
  });
  /** What must be given before there can be a plan. */
  const lacks = () => (model().takes_image && !element.input_reference.files.length ? "Choose a first frame: this model begins with a picture." : "");

  return { element, body, fill, problem, recall, takePicture, lacks };
}

function knobField(name, lever) {
  const title = h("span", { class: "label" }, name.replace(/^transformer_cache/, "cache").replaceAll("_", " "));
  const control = TYPED.has(name)
    ? h("input", { name, placeholder: "auto", autocomplete: "off" })
    : h("select", { name }, ["auto", "off", ...(CHOICES[name] ?? ["on"])].map((word) => h("option", { value: word }, word)));
  return h("label", { class: "field", title: `${name}: ${lever.summary}` }, title, control);
}

function setKnob(control, value) {
  const word = value ?? (control.tagName === "SELECT" ? "auto" : "");
  if (control.tagName === "SELECT" && ![...control.options].some((option) => option.value === word)) {
    control.append(h("option", { value: word }, word));
  }
  control.value = word;
}
