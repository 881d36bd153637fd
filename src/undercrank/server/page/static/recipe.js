// The recipe inside an mp4 of undercrank: moov > (udta >) meta > keys and ilst, as FFmpeg writes named metadata.
// Only the headers and `moov` are read, so a long film costs no more than a short one, and nothing is uploaded.

const MOST = 64 * 2 ** 20; // bytes of `moov`: an hour's table of frames is smaller

export async function recipeOf(file) {
  const moov = await topBox(file, "moov");
  if (!moov) throw new Error(`${file.name} is no mp4`);
  const text = tags(moov).get("recipe");
  if (!text) throw new Error(`${file.name} holds no recipe: it was not made here, or another tool rewrote it`);
  const recipe = JSON.parse(text);
  if (!recipe?.request) throw new Error(`the recipe in ${file.name} holds no request`);
  return recipe;
}

async function topBox(file, wanted) {
  for (let at = 0; at + 8 <= file.size; ) {
    const head = new DataView(await file.slice(at, at + 16).arrayBuffer());
    const { type, start, size } = header(head, 0, file.size - at);
    if (size < 8 || size > file.size - at) return null;
    if (type === wanted && size <= MOST) return new DataView(await file.slice(at + start, at + size).arrayBuffer());
    at += size;
  }
  return null;
}

function header(view, at, rest) {
  let [size, start] = [view.getUint32(at), 8];
  if (size === 1) [size, start] = [Number(view.getBigUint64(at + 8)), 16];
  if (size === 0) size = rest;
  return { type: text(view, at + 4, 4), start, size };
}

function* boxes(view) {
  for (let at = 0; at + 8 <= view.byteLength; ) {
    const { type, start, size } = header(view, at, view.byteLength - at);
    if (size < start || at + size > view.byteLength) return;
    yield { type, body: new DataView(view.buffer, view.byteOffset + at + start, size - start) };
    at += size;
  }
}

function inside(view, type) {
  for (const box of boxes(view)) if (box.type === type) return box.body;
  return null;
}

const after = (view, bytes) => new DataView(view.buffer, view.byteOffset + bytes, view.byteLength - bytes);

function tags(moov) {
  const holder = inside(moov, "meta") ?? inside(inside(moov, "udta") ?? new DataView(new ArrayBuffer(0)), "meta");
  const found = new Map();
  if (!holder) return found;
  const meta = text(holder, 4, 4) === "hdlr" ? holder : after(holder, 4); // a version and flags come first in mp4
  const [keys, values] = [inside(meta, "keys"), inside(meta, "ilst")];
  if (!keys || !values) return found;
  const names = [...boxes(after(keys, 8))].map((box) => text(box.body, 0, box.body.byteLength));
  for (const item of boxes(values)) {
    const data = inside(item.body, "data");
    const index = [...item.type].reduce((sum, char) => sum * 256 + char.charCodeAt(0), 0);
    if (data && names[index - 1]) found.set(names[index - 1], utf8(after(data, 8)));
  }
  return found;
}

function text(view, at, length) {
  let letters = "";
  for (let i = at; i < Math.min(at + length, view.byteLength); i += 1) letters += String.fromCharCode(view.getUint8(i));
  return letters;
}

const utf8 = (view) => new TextDecoder().decode(view);
