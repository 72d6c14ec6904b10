// Talks to the server: with the key that was entered once, for this tab only.

const KEY = "parkd-key";
const ACTION = { "x-parkd-action": "1" };
const FIRST_WAIT_S = 1;
const LONGEST_WAIT_S = 15;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export function headers(more) {
  return { ...(key.get() ? { authorization: `Bearer ${key.get()}` } : {}), ...more };
}

/** Raises Refused with the server's own words, and TypeError where there is no server. */
async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error?.message ?? `The server answered ${response.status}.`);
}

export async function get(path) {
  return (await checked(await fetch(path, { headers: headers(), cache: "no-store" }))).json();
}

export async function act(method, path, body) {
  const sent = { method, headers: headers({ ...ACTION, "content-type": "application/json" }), body: body && JSON.stringify(body) };
  const response = await checked(await fetch(path, sent));
  return response.status === 204 ? null : response.json().catch(() => null);
}

export async function stream(path, body, signal) {
  const sent = { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal };
  return checked(await fetch(path, sent));
}

/** The data of each server-sent event of a response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const frames = text.split("\n\n");
    text = frames.pop();
    for (const frame of frames) {
      const data = frame.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) yield data;
    }
  }
}

/** Calls `on.state` with each state of the server, for as long as the page is open; `on.lost(error, waits_s)` where it
    cannot be reached, `on.refused(error)` where it asks for another key: then it waits for `again()`. */
export function listen(on) {
  let wake = () => {};
  let abort = new AbortController();
  const again = () => { abort.abort(); wake(); };
  (async () => {
    let wait_s = FIRST_WAIT_S;
    for (;;) {
      abort = new AbortController();
      let refused = false;
      try {
        const response = await checked(await fetch("/parkd/events", { headers: headers(), cache: "no-store", signal: abort.signal }));
        for await (const data of events(response)) {
          wait_s = FIRST_WAIT_S;
          on.state(JSON.parse(data));
        }
        throw new TypeError("The server ended the connection.");
      } catch (error) {
        refused = error instanceof Refused && (error.status === 401 || error.status === 403);
        if (refused) on.refused(error);
        else if (error.name !== "AbortError") on.lost(error, wait_s);
      }
      if (abort.signal.aborted) continue;
      await new Promise((done) => {
        wake = done;
        if (!refused) setTimeout(done, 1000 * wait_s);
      });
      wait_s = Math.min(LONGEST_WAIT_S, 2 * wait_s);
    }
  })();
  return again;
}
