// The ledger: gain against distance of every measured row, the rounding floor drawn, and the rows themselves.

import { get, post } from "./api.js";
import { $, h, s } from "./dom.js";
import { figure } from "./words.js";

const { data: rows, metrics } = await get("/v1/ledger");
const metricOf = new Map(metrics.map((metric) => [metric.name, metric]));
const ALL = "";
const H = 420, LEFT = 56, RIGHT = 24, TOP = 40, BOTTOM = 52;
let W = 960; // of the chart, in pixels: its letters stay as large as the page's

function choices(id, values, all) {
  $(id).replaceChildren(...(all ? [h("option", { value: ALL }, all)] : []), ...values.map(([value, title]) => h("option", { value }, title)));
  $(id).addEventListener("change", show);
}

const distinct = (name) => [...new Set(rows.map((row) => row[name]).filter(Boolean))].sort().map((value) => [value, value]);

function show() {
  const fits = (row) => ["family", "lever", "source"].every((name) => $(name).value === ALL || row[name] === $(name).value);
  const shown = rows.filter(fits);
  drawChart(shown, metricOf.get($("metric").value));
  drawTable(shown);
}

// --------------------------------------------------------------------------- chart

function drawChart(shown, metric) {
  const points = metric ? shown.filter((row) => row.gain && metric.name in row.distances).map((row) => ({ row, x: row.distances[metric.name], y: row.gain })) : [];
  const floors = metric ? shown.map((row) => row.floor[metric.name]).filter((value) => value !== undefined) : [];
  $("chart-said").textContent = caption(points, floors, metric);
  $("chart").replaceChildren(points.length ? chart(points, floors, metric) : nothing());
}

const nothing = () => h("div", { class: "empty" },
  h("p", {}, "No row here has both a gain and this distance."),
  h("p", { class: "hint" }, "`undercrank bench` and `undercrank verify` measure them, and each adds rows."));

function caption(points, floors, metric) {
  if (!points.length) return "";
  const floor = floors.length ? " The shaded part is inside the rounding floor." : " No rounding floor of these rows was measured.";
  return `${points.length} rows. Up is faster, left is nearer to the film without the lever (${metric.title}, ${metric.unit}). The line joins rows that no other beats in both.${floor}`;
}

function chart(points, floors, metric) {
  W = Math.max(280, $("chart").clientWidth);
  const floor = floors.length ? nearest(floors, metric) : null; // the strictest of those that are shown
  const xs = [...points.map((point) => point.x), ...(floor === null ? [] : [floor])];
  const x = scale(xs, [LEFT, W - RIGHT], { zero: metric.closer === "lower", turned: metric.closer === "higher" });
  const y = scale([1, ...points.map((point) => point.y)], [H - BOTTOM, TOP], { zero: false });
  const front = pareto(points, metric);
  const picture = s("svg", { viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": "Gain against distance" });
  picture.append(
    ...(floor === null ? [] : floorMarks(x, floor)),
    ...y.ticks.flatMap((tick) => [line(LEFT, y.at(tick), W - RIGHT, y.at(tick), "grid-line"), label(LEFT - 8, y.at(tick) + 4, `${figure(tick)}\u00d7`, "end")]),
    ...x.ticks.filter((_, i) => W > 500 || i % 2 === 0).map((tick) => label(x.at(tick), H - BOTTOM + 20, figure(tick), "middle")),
    line(LEFT, H - BOTTOM, W - RIGHT, H - BOTTOM, "axis"),
    label((LEFT + W - RIGHT) / 2, H - 8, `${metric.title}, ${metric.closer} is nearer`, "middle"),
    label(LEFT - 8, TOP - 20, "gain", "end"),
    s("polyline", { class: "front", points: front.map((point) => `${x.at(point.x)},${y.at(point.y)}`).join(" ") }),
    ...points.map((point) => dot(point, x, y, front.includes(point))),
    ...front.map((point) => label(x.at(point.x) + 9, y.at(point.y) + 18, named(point.row), "start", "mark-name")),
  );
  return picture;
}

const nearest = (values, metric) => (metric.closer === "lower" ? Math.min(...values) : Math.max(...values));
const named = (row) => [row.lever, row.setting].filter(Boolean).join(" ");

function floorMarks(x, floor) {
  const [from, to] = [x.at(x.near), x.at(floor)];
  return [
    s("rect", { class: "floor", x: Math.min(from, to), y: TOP, width: Math.abs(to - from), height: H - BOTTOM - TOP }),
    line(to, TOP, to, H - BOTTOM, "floor-line"),
    label(to + 6, TOP + 12, "rounding floor", "start"),
  ];
}

/** Rows that no other row beats in both gain and distance, from near to far. */
function pareto(points, metric) {
  const sign = metric.closer === "lower" ? 1 : -1;
  const sorted = [...points].sort((p, q) => sign * (p.x - q.x) || q.y - p.y);
  const front = [];
  for (const point of sorted) if (!front.length || point.y > front.at(-1).y) front.push(point);
  return front;
}

function dot({ row, x: distance, y: gain }, x, y, best) {
  const words = `${named(row)}, ${row.family}: ${figure(gain)} times as fast at distance ${figure(distance)}; ${row.width}x${row.height}, ${row.num_frames} frames, ${row.num_inference_steps} steps, n ${row.n}, ${row.device} (${row.source})`;
  return s("circle", { class: best ? "dot best" : "dot", cx: x.at(distance), cy: y.at(gain), r: 6, tabindex: 0, role: "img", "aria-label": words }, s("title", {}, words));
}

function scale(values, [from, to], { zero, turned = false }) {
  let [low, high] = [Math.min(...values, ...(zero ? [0] : [])), Math.max(...values)];
  const step = niceStep((high - low || Math.abs(high) || 1) / 5);
  [low, high] = [Math.floor(low / step) * step, Math.ceil(high / step + 0.25) * step];
  const count = Math.round((high - low) / step);
  const ticks = Array.from({ length: count + 1 }, (_, i) => Number((low + i * step).toPrecision(12)));
  const share = (value) => (turned ? (high - value) / (high - low) : (value - low) / (high - low));
  return { ticks, near: turned ? high : low, at: (value) => from + share(value) * (to - from) };
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= rough);
}

const line = (x1, y1, x2, y2, name) => s("line", { x1, y1, x2, y2, class: name });
const label = (x, y, text, anchor, name) => s("text", { x, y, "text-anchor": anchor, class: name }, text);

// --------------------------------------------------------------------------- rows

function drawTable(shown) {
  const heads = ["lever", "model", "gain", "step, ms", "distances", "floor", "shape", "n", "device", "source", "note"];
  const numbers = new Set(["gain", "step, ms", "n"]);
  $("rows").replaceChildren(
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: numbers.has(head) ? "number" : null }, head)))),
    h("tbody", {}, [...shown].reverse().map(tableRow)));
}

function tableRow(row) {
  const step = row.step_ms === null || row.step_ms === undefined ? "" : `${figure(row.step_ms)}${row.spread_ms ? ` \u00b1 ${figure(row.spread_ms)}` : ""}`;
  const cells = [
    [row.lever ? named(row) : "whole run"], [row.family], [row.gain ? `${figure(row.gain)}\u00d7` : "", "number"], [step, "number"],
    [pairs(row.distances)], [pairs(row.floor)], [`${row.width}\u00d7${row.height}, ${row.num_frames} f, ${row.num_inference_steps} st, ${row.dtype}`],
    [String(row.n), "number"], [row.device], [row.source], [row.note ?? "", "note"],
  ];
  return h("tr", {}, cells.map(([text, name]) => h("td", { class: name }, text)));
}

const pairs = (values) => Object.entries(values ?? {}).map(([name, value]) => `${metricOf.get(name)?.title ?? name} ${figure(value)}`).join(", ");

// --------------------------------------------------------------------------- start

const measured = [...new Set(rows.filter((row) => row.gain).flatMap((row) => Object.keys(row.distances)))];
const liked = ["st_lpips_alex", "lpips", "psnr_db"];
measured.sort((p, q) => (liked.indexOf(p) + 99) % 99 - (liked.indexOf(q) + 99) % 99);
choices("family", distinct("family"), "All models");
choices("lever", distinct("lever"), "All levers");
choices("source", distinct("source"), "All sources");
choices("metric", measured.map((name) => [name, metricOf.get(name)?.title ?? name]));
$("sign-out")?.addEventListener("click", async () => { await post("/logout"); location.assign("/"); });
let later;
addEventListener("resize", () => { clearTimeout(later); later = setTimeout(show, 100); });
document.documentElement.dataset.ready = "yes";
show();
