// Chooses the view by the address's hash, and keeps one stream of the server's state for all of them.

import { key, listen } from "./api.js";
import { empty, fill, h } from "./dom.js";
import * as now from "./now.js";

const VIEWS = {
  now: { title: "Now", load: async () => now },
  conversations: { title: "Conversations", load: () => import("./conversations.js") },
  budget: { title: "Budget", load: () => import("./budget.js") },
  cold: { title: "Cold reads", load: () => import("./cold.js") },
  try: { title: "Try", load: () => import("./try.js") },
};

const AHEAD_MS = 1000;
const at = (id) => document.getElementById(id);
const page = { state: null, view: null, name: "", again: () => {} };

function nameOfView() {
  const name = location.hash.replace(/^#\/?/, "").split("/")[0];
  return name in VIEWS ? name : "now";
}

async function show(focus) {
  const name = nameOfView();
  if (name === page.name) return page.view?.moved?.();
  page.name = name;
  for (const link of at("views").querySelectorAll("a")) {
    const here = link.dataset.view === name;
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (here) link.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  document.title = `${VIEWS[name].title} · parkd`;
  const module = await VIEWS[name].load().catch(() => unloaded);
  if (page.name !== name) return;
  page.view?.close?.();
  const root = h("div", { class: `view ${name}` });
  page.view = module.open(root, { state: () => page.state, say });
  fill(at("main"), h("h1", {}, VIEWS[name].title), root);
  if (focus) at("main").focus({ preventScroll: true });
  scrollTo(0, 0);
}

/** What stands for a view whose file did not come; it tries again when the server is back. */
const unloaded = {
  open(root) {
    root.append(empty("This view could not be loaded.", "It will be when the server answers again."));
    return { changed() { page.name = ""; show(false); } };
  },
};

/** A line above the view. `kind`: bad, good, or empty to take it away. */
function say(kind, ...words) {
  fill(at("notice"), kind ? h("div", { class: `notice ${kind}` }, ...words) : null);
}

function link(kind, words) {
  at("link").className = `link ${kind}`;
  at("link-words").textContent = words;
  document.body.classList.toggle("stale", kind === "lost");
}

function askForKey(error) {
  link("refused", "asks for a key");
  const field = h("input", { type: "password", id: "key", autocomplete: "off", spellcheck: "false", required: true });
  const form = h("form", { class: "key", onsubmit: enter },
    h("label", { for: "key" }, "API key"), field, h("button", { type: "submit", class: "main" }, "Use this key"),
    h("p", {}, error.status === 401 && key.get() ? "The server does not know the key. " : "", error.message),
    h("p", { class: "quiet" }, "It is kept in this tab until you close it. A key sees its own conversations; an operator's key sees all."));
  function enter(event) {
    event.preventDefault();
    key.set(field.value.trim());
    say("");
    page.again();
    if (page.name) { page.name = ""; show(true); }
  }
  say("bad", form);
  field.focus();
}

const on = {
  state(state) {
    const first = page.state === null;
    page.state = state;
    link(state.state === "ok" ? "live" : "lost", state.state === "ok" ? "live" : state.state === "lost" ? "engine lost" : "stopping");
    at("model").textContent = state.model;
    if (first || at("notice").querySelector(".lost-server, .key")) say("");
    page.view?.changed?.(state);
  },
  lost(error, wait_s) {
    link("lost", "not connected");
    say("bad", h("p", { class: "lost-server" }, h("strong", {}, "The server does not answer. "),
      `What you see is from before. Trying again in ${wait_s} s.`));
  },
  refused: askForKey,
};

fill(at("views"), Object.entries(VIEWS).map(([name, view]) => h("a", { href: `#/${name}`, "data-view": name }, view.title)));
addEventListener("hashchange", () => show(true));
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); at("main").focus(); });
show(false);
setTimeout(() => { for (const view of Object.values(VIEWS)) view.load().catch(() => {}); }, AHEAD_MS); // so that they open without waiting
page.again = listen(on);
