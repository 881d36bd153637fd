// Elements from code: text is always text, never markup.

const SVG = document.getElementById("mark").namespaceURI;

export const $ = (id) => document.getElementById(id);
export const h = (tag, options, ...children) => made(document.createElement(tag), options, children);
export const s = (tag, options, ...children) => made(document.createElementNS(SVG, tag), options, children);

function made(element, options, children) {
  for (const [name, value] of Object.entries(options ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

let sayLater;
/** Tell it to who listens instead of looking; not more often than they can follow. */
export function say(text, delay = 0) {
  clearTimeout(sayLater);
  sayLater = setTimeout(() => { $("say").textContent = text; }, delay);
}
