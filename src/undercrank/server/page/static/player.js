// Two films under one clock. A leads; B is put right as soon as it is half a frame off. All positions are frames.

import { $ } from "./dom.js";

export function makePlayer({ moved }) {
  const [a, b] = [$("video-a"), $("video-b")];
  const [canvas, pen] = [$("map"), $("map").getContext("2d", { willReadFrequently: true })];
  const other = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  let clip = { frames: 1, fps: 16 };
  let mode = "wipe";
  let gain = 16;
  let at = 0; // the frame that was asked for
  let settling = null;

  const middle = (frame) => (frame + 0.5) / clip.fps;
  const frameAt = (time) => Math.min(clip.frames - 1, Math.max(0, Math.floor(time * clip.fps + 1e-3)));

  function load(sources, { frames, fps }) {
    clip = { frames, fps };
    at = 0;
    settling = Promise.all([a, b].map(ready)); // whoever steps now is heard once both are there
    [a.src, b.src] = sources;
    return settling.finally(() => { settling = null; }).then(settle);
  }

  const ready = (film) => new Promise((resolve, reject) => {
    film.addEventListener("loadeddata", resolve, { once: true });
    film.addEventListener("error", () => reject(new Error("this film cannot be played here")), { once: true });
  });

  function seek(frame) {
    pause();
    at = Math.min(clip.frames - 1, Math.max(0, frame));
    settle();
  }

  /** Bring both films to the frame that was last asked for, however often that changes meanwhile. */
  function settle() {
    settling ??= goThere().finally(() => { settling = null; });
    return settling;
  }

  async function goThere() {
    for (let there = -1; there !== at; ) {
      there = at;
      await Promise.all([a, b].map((film) => sought(film, middle(there))));
    }
    show();
  }

  const sought = (film, to) => new Promise((resolve) => {
    if (Math.abs(film.currentTime - to) < 1e-6 && !film.seeking) return resolve();
    film.addEventListener("seeked", resolve, { once: true });
    film.currentTime = to;
    return undefined;
  });

  const frame = () => (a.paused ? at : frameAt(a.currentTime));

  function play() {
    b.currentTime = a.currentTime;
    a.play();
    b.play();
  }

  function pause() {
    if (a.paused) return;
    at = frameAt(a.currentTime);
    a.pause();
    b.pause();
  }

  /** At each frame of A that is shown. */
  function tick() {
    if (!a.paused) {
      const off = Math.abs(a.currentTime - b.currentTime);
      if (off > 0.5 / clip.fps && off < a.duration / 2) b.currentTime = a.currentTime;
      show();
    }
    next();
  }

  const next = () => (a.requestVideoFrameCallback ? a.requestVideoFrameCallback(tick) : requestAnimationFrame(tick));

  function show() {
    moved(frame(), mode === "map" ? drawMap() : null);
  }

  /** |A - B| of each channel, times the gain; the largest difference of any value. */
  function drawMap() {
    const [width, height] = [a.videoWidth, a.videoHeight];
    if (!width || b.videoWidth !== width || b.videoHeight !== height) return null;
    if (canvas.width !== width || canvas.height !== height) {
      Object.assign(canvas, { width, height });
      Object.assign(other.canvas, { width, height });
    }
    pen.drawImage(a, 0, 0);
    other.drawImage(b, 0, 0);
    const [first, second] = [pen, other].map((each) => each.getImageData(0, 0, width, height));
    const [x, y] = [first.data, second.data];
    let largest = 0;
    for (let i = 0; i < x.length; i += 1) {
      if (i % 4 === 3) continue;
      const off = Math.abs(x[i] - y[i]);
      if (off > largest) largest = off;
      x[i] = off * gain;
    }
    pen.putImageData(first, 0, 0);
    return largest;
  }

  next();
  return {
    load, seek, play, pause,
    get frame() { return frame(); },
    get isPlaying() { return !a.paused; },
    set mode(word) { mode = word; show(); },
    set gain(times) { gain = times; show(); },
  };
}
