// Figures as people read them.

export const PROMISES = { exact: "= exact", rounding: "\u2248 rounding", lossy: "\u2260 lossy" };
export const promise = (word) => PROMISES[word] ?? "";

export function seconds(value) {
  if (value === null || value === undefined) return "unknown";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "unknown";
  if (value < 2 ** 30) return `${Math.round(value / 2 ** 20)} MiB`;
  return `${(value / 2 ** 30).toFixed(1)} GiB`;
}

/** Four digits, whatever the size. */
export function figure(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value === 0) return "0";
  return Number.isInteger(value) && Math.abs(value) < 10000 ? String(value) : String(Number(value.toPrecision(4)));
}

export function rate(text) {
  const [above, below = "1"] = String(text).split("/");
  return Number(above) / Number(below);
}

export const size = (video) => `${video.width}\u00d7${video.height}`;
export const facts = (video) =>
  `${video.model} \u00b7 ${size(video)} \u00b7 ${video.num_frames} frames \u00b7 ${video.num_inference_steps} steps \u00b7 seed ${video.seed}`;
