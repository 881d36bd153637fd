// Two clips beside each other: one player, the fidelity card, and what their recipes do not share.

import { content, get, post } from "./api.js";
import { $, h } from "./dom.js";
import { makePlayer } from "./player.js";
import { figure, promise, rate, seconds, size } from "./words.js";

const chosen = new URLSearchParams(location.search);
const clips = (await all()).filter((video) => video.status === "completed");
const player = makePlayer({ moved });
let pair = null;

async function all() {
  const found = [];
  for (let page = { has_more: true, last_id: null }; page.has_more && found.length < 400; ) {
    page = await get(`/v1/videos?limit=100${page.last_id ? `&after=${encodeURIComponent(page.last_id)}` : ""}`);
    found.push(...page.data);
  }
  return found;
}

function choices(side) {
  const title = (video) => `${video.prompt.slice(0, 60) || "Clip"} \u00b7 ${size(video)} \u00b7 seed ${video.seed} \u00b7 ${video.fidelity}`;
  $(side).replaceChildren(
    h("option", { value: "" }, "Choose a clip"),
    ...clips.map((video) => h("option", { value: video.id, selected: video.id === chosen.get(side) }, title(video))));
  $(side).addEventListener("change", () => {
    chosen.set(side, $(side).value);
    history.replaceState(null, "", `?${chosen}`);
    show();
  });
}

async function show() {
  const [a, b] = ["a", "b"].map((side) => clips.find((video) => video.id === $(side).value));
  $("compare-body").hidden = !(a && b);
  $("compare-empty").hidden = Boolean(a && b);
  if (!a || !b) return;
  pair = [a, b];
  const frames = Math.min(a.num_frames, b.num_frames);
  $("seek").max = frames - 1;
  $("differs").replaceChildren(...differences(a, b));
  $("card").replaceChildren(h("p", { class: "hint" }, "Comparing ..."));
  setMode(document.querySelector("[name=mode]:checked").value);
  try {
    await player.load([a, b].map((video) => content(video.id, "video")), { frames, fps: rate(a.fps) });
  } catch (error) {
    $("where").textContent = error.message;
  }
  await card(a, b);
}

// --------------------------------------------------------------------------- player

function moved(frame, largest) {
  $("seek").value = frame;
  $("where").textContent = `frame ${frame + 1} of ${Number($("seek").max) + 1}`;
  $("play").textContent = player?.isPlaying ? "Pause" : "Play";
  if (pair && size(pair[0]) !== size(pair[1])) $("map-said").textContent = "the sizes differ: there is no map";
  else $("map-said").textContent = largest === null ? "" : `largest difference ${largest} of 255, as the mp4 shows it`;
}

function setMode(word) {
  $("frame").dataset.mode = word;
  $("wipe-part").hidden = word !== "wipe";
  $("gain-part").hidden = word !== "map";
  for (const each of document.querySelectorAll("[name=mode]")) each.checked = each.value === word;
  setWipe(Number($("wipe").value));
  player.mode = word;
}

/** Left of the edge is A, right of it B; the edge runs over the picture, not over the bars beside it. */
function setWipe(percent) {
  $("wipe").value = percent;
  const { left, width } = pictureBox();
  const at = left + (width * percent) / 100;
  $("video-b").style.clipPath = $("frame").dataset.mode === "wipe" ? `inset(0 0 0 ${at}px)` : "none";
  $("edge").style.left = `${at}px`;
}

function pictureBox() {
  const [box, film] = [$("frame").getBoundingClientRect(), $("video-a")];
  const shape = film.videoWidth / film.videoHeight || 4 / 3;
  const width = Math.min(box.width, box.height * shape);
  return { left: (box.width - width) / 2, width };
}

function drag(event) {
  if ($("frame").dataset.mode !== "wipe" || !(event.buttons & 1)) return;
  const { left, width } = pictureBox();
  const x = event.clientX - $("frame").getBoundingClientRect().left;
  setWipe(Math.round(Math.min(100, Math.max(0, (100 * (x - left)) / width))));
}

const step = (by) => player.seek(player.frame + by);
const toggle = () => {
  if (player.isPlaying) player.seek(player.frame); // both stand still in the middle of one frame
  else player.play();
  $("play").textContent = player.isPlaying ? "Pause" : "Play";
};

const KEYS = {
  " ": toggle, ",": () => step(-1), ".": () => step(1),
  1: () => setMode("wipe"), 2: () => setMode("side"), 3: () => setMode("map"),
};

function pressed(event) {
  const typing = event.target.closest("input, select, textarea, button, a");
  if (typing && event.key === " ") return;
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key] || $("compare-body").hidden) return;
  if (event.target.closest("select")) return;
  event.preventDefault();
  KEYS[event.key]();
}

// --------------------------------------------------------------------------- card

async function card(a, b) {
  try {
    const found = await get(`/v1/compare?a=${encodeURIComponent(a.id)}&b=${encodeURIComponent(b.id)}`);
    if (pair[0] === a && pair[1] === b) $("card").replaceChildren(...cardView(found));
  } catch (error) {
    $("card").replaceChildren(h("p", { class: "problem" }, error.message));
  }
}

function cardView(found) {
  const verdict = { true: "Bit-identical", false: "Not bit-identical", null: "Not known whether bit-identical" }[found.identical];
  return [
    h("p", { class: found.identical ? "verdict same" : "verdict" }, verdict),
    h("p", { class: "hint" }, found.basis),
    found.distances.length ? distancesView(found.distances) : null,
    !found.identical && !found.distances.length ? masterButton() : null,
    ...found.faults.map((fault) => h("p", { class: "problem" }, `B is ${fault}`)),
    found.identical ? null : h("p", { class: "hint" }, found.floor_note),
  ].filter(Boolean);
}

function distancesView(distances) {
  const withFloor = distances.some((each) => each.floor !== null);
  const heads = ["distance", "value", "worst", ...(withFloor ? ["floor"] : [])];
  return h("table", { class: "distances" },
    h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", { scope: "col", class: i ? "number" : null }, head)))),
    h("tbody", {}, distances.map((each) => h("tr", { title: [each.sees && `sees ${each.sees}`, each.blind && `blind to ${each.blind}`].filter(Boolean).join("; ") },
      h("th", { scope: "row" }, each.title, h("br"), h("small", {}, each.value === null ? each.note : `${each.unit}, ${each.closer} is nearer`)),
      h("td", { class: "number" }, figure(each.value)),
      h("td", { class: "number" }, figure(each.worst)),
      withFloor ? h("td", { class: "number" }, figure(each.floor), h("br"), h("small", {}, each.inside_floor === null ? "" : each.inside_floor ? "inside" : "outside")) : null))));
}

/** The same seed makes the same frames: what lacks a master can be made again with one. */
function masterButton() {
  const lacking = pair.filter((video) => !video.variants.includes("master"));
  if (lacking.some((video) => video.request.image)) return null; // its picture is not here any more
  const button = h("button", { type: "button" }, lacking.length > 1 ? "Make both again with masters" : "Make it again with a master");
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      for (const video of lacking) await post("/v1/videos", again(video.request));
      button.replaceWith(h("p", { class: "hint" }, "They are in the queue of the ", h("a", { href: "/" }, "studio"), ": choose them here once they are done."));
    } catch (error) {
      button.replaceWith(h("p", { class: "problem" }, error.message));
    }
  });
  return button;
}

function again(request) {
  const { wishes, image, device, dtype, ...fields } = request; // where it ran is the server's affair
  const asked = Object.entries({ ...fields, ...Object.fromEntries(wishes) }).filter(([, value]) => value !== null);
  return { ...Object.fromEntries(asked), master: true };
}

const NAMES = ["prompt", "negative_prompt", "model", "width", "height", "num_frames", "fps", "num_inference_steps", "guidance_scale", "guidance_scale_2", "flow_shift", "seed", "fidelity", "dtype", "device"];

function differences(a, b) {
  const on = (video) => (video.plan?.decisions ?? []).filter((each) => each.status === "applied").map((each) => `${each.lever} ${each.chosen}`).join(", ") || "none";
  const rows = NAMES.map((name) => [name.replaceAll("_", " "), a.request[name], b.request[name]]);
  rows.push(["levers on", on(a), on(b)], ["promise", promise(a.promise), promise(b.promise)]);
  rows.push(["time", seconds(a.inference_time_s), seconds(b.inference_time_s)]);
  const unlike = rows.filter(([, x, y]) => String(x ?? "") !== String(y ?? ""));
  if (!unlike.length) return [h("p", { class: "hint" }, "Nothing: one recipe.")];
  return [h("table", { class: "distances" },
    h("thead", {}, h("tr", {}, ["", "A", "B"].map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, unlike.map(([name, x, y]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, String(x ?? "\u2013")), h("td", {}, String(y ?? "\u2013"))))))];
}

// --------------------------------------------------------------------------- start

for (const side of ["a", "b"]) choices(side);
$("play").addEventListener("click", toggle);
$("back").addEventListener("click", () => step(-1));
$("on").addEventListener("click", () => step(1));
$("seek").addEventListener("input", () => player.seek(Number($("seek").value)));
$("wipe").addEventListener("input", () => setWipe(Number($("wipe").value)));
$("gain").addEventListener("change", () => { player.gain = Number($("gain").value); });
for (const each of document.querySelectorAll("[name=mode]")) each.addEventListener("change", () => setMode(each.value));
for (const kind of ["pointerdown", "pointermove"]) $("frame").addEventListener(kind, drag);
addEventListener("resize", () => setWipe(Number($("wipe").value)));
$("video-a").addEventListener("loadedmetadata", () => setWipe(Number($("wipe").value)));
document.addEventListener("keydown", pressed);
$("sign-out")?.addEventListener("click", async () => { await post("/logout"); location.assign("/"); });
document.documentElement.dataset.ready = "yes";
await show();
