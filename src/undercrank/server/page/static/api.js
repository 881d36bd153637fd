// The HTTP API as the page calls it. Errors carry the server's own words and the field that they speak of.

export class Refused extends Error {
  constructor({ message, param, code }, status) {
    super(message);
    Object.assign(this, { param, code, status });
  }
}

export const get = (path, options) => ask(path, options);
export const post = (path, body = {}, options = {}) => ask(path, { method: "POST", ...encoded(body), ...options });
export const remove = (path) => ask(path, { method: "DELETE" });

function encoded(body) {
  if (body instanceof FormData) return { body };
  return { body: JSON.stringify(body), headers: { "content-type": "application/json" } };
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { credentials: "same-origin", ...options });
  const data = await answer.json().catch(() => null);
  if (answer.ok) return data;
  throw new Refused(data?.error ?? { message: `the server answered ${answer.status}` }, answer.status);
}

export const video = (id) => `/v1/videos/${encodeURIComponent(id)}`;
export const content = (id, variant) => `${video(id)}/content?variant=${variant}`;
