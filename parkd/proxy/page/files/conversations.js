// All conversations as trees by shared prefix, what each takes, and what can be done with it.

import { act, get } from "./api.js";
import { empty, figures, fill, h } from "./dom.js";
import { ago, bytes, count, plural, seconds, short } from "./format.js";
import { turnRow } from "./turns.js";

const RELOAD_S = 10;
const KEEP_HOURS = [1, 8, 24];
const TURNS_SHOWN = 8;
const ORDERS = {
  used: ["recently used", (each) => each.idle_s ?? Infinity],
  size: ["largest", (each) => -each.tokens],
  age: ["newest", (each) => each.age_s ?? Infinity],
  value: ["next to go", (each) => each.value ?? Infinity],
};

const bytesOf = (each) => each.bytes ?? {};
const title = (each) => each.first_words?.user || each.first_words?.system || "";

/** Conversations with their depth, children behind their parent. `parent` names the one that shares most of its prefix. */
export function tree(conversations, order) {
  const known = new Map(conversations.map((each) => [each.id, each]));
  const children = new Map();
  const roots = [];
  for (const each of conversations) {
    if (known.has(each.parent) && each.parent !== each.id) {
      if (!children.has(each.parent)) children.set(each.parent, []);
      children.get(each.parent).push(each);
    } else roots.push(each);
  }
  const best = new Map();
  const rank = (each, path) => {
    if (best.has(each)) return best.get(each);
    const under = (children.get(each.id) ?? []).filter((child) => !path.has(child));
    const least = under.reduce((low, child) => Math.min(low, rank(child, new Set(path).add(child))), order(each));
    best.set(each, least);
    return least;
  };
  const rows = [];
  const put = (each, depth) => {
    if (seen.has(each)) return;
    seen.add(each);
    rows.push([each, depth]);
    for (const child of sorted(children.get(each.id) ?? [])) put(child, depth + 1);
  };
  const sorted = (list) => [...list].sort((one, other) => rank(one, new Set([one])) - rank(other, new Set([other])));
  const seen = new Set();
  for (const root of sorted(roots)) put(root, 0);
  for (const each of conversations) put(each, 0); // of a circle, which no server should tell
  return rows;
}

export function open(root, page) {
  const view = { all: null, order: "used", find: "", open: opened(), timer: 0, at: "" };
  const head = h("div", { class: "tools" });
  const list = h("div");
  const find = h("input", { type: "search", id: "find", placeholder: "id or words", oninput: () => { view.find = find.value.trim().toLowerCase(); draw(); } });
  const order = h("select", { id: "order", onchange: () => { view.order = order.value; draw(); } },
    Object.entries(ORDERS).map(([name, [words]]) => h("option", { value: name }, words)));
  const sum = h("p", { class: "sum", role: "status" });
  head.append(sum, h("div", {}, h("label", { for: "find" }, "Find"), find), h("div", {}, h("label", { for: "order" }, "Order"), order));
  root.append(head, list);
  head.hidden = true;

  async function load() {
    clearTimeout(view.timer);
    try {
      view.all = (await get("/parkd/conversations")).conversations;
      draw();
    } catch (error) {
      if (view.all === null) fill(list, empty("The conversations could not be read.", error.message));
    }
    view.timer = setTimeout(load, 1000 * RELOAD_S);
  }

  function draw() {
    const all = view.all;
    if (!all) return;
    head.hidden = all.length === 0;
    if (!all.length) return fill(list, empty("No conversation is parked or live.",
      "After its first turn, each conversation shows here, with what it takes. ", h("a", { href: "#/try" }, "Try one")));
    const kept = view.find ? all.filter((each) => `${each.id} ${each.first_words?.system ?? ""} ${each.first_words?.user ?? ""}`.toLowerCase().includes(view.find)) : all;
    const ram = page.state()?.budget?.ram.used_bytes; // rows that several share are counted for each of them, so no sum of theirs
    fill(sum, h("b", {}, count(kept.length)), kept.length === all.length ? "" : ` of ${count(all.length)}`, kept.length === 1 ? " conversation" : " conversations",
      h("span", { class: "quiet" }, ` · ${plural(all.filter((each) => each.live).length, "live", "live")}${ram === undefined ? "" : ` · ${bytes(ram)} in RAM`}`));
    const most = Math.max(...all.map((each) => each.tokens), 1);
    fill(list, kept.length ? h("div", { class: "tree", role: "list", "aria-label": "Conversations" },
      h("div", { class: "columns", "aria-hidden": "true" }, ["Conversation", "Tokens", "RAM", "Disk", "Used", "Turns", ""].map((word) => h("span", {}, word))),
      tree(kept, ORDERS[view.order][1]).map(([each, depth]) => row(each, depth, most))) : empty("None matches.", "Look for another id or word."));
  }

  function row(each, depth, most) {
    const is_open = view.open === each.id;
    const sizes = bytesOf(each);
    const name = h("button", {
      type: "button", class: "name", "data-key": `c-${each.id}`, "aria-expanded": String(is_open), onclick: () => { view.open = is_open ? "" : each.id; draw(); },
    }, h("code", {}, short(each.id)), title(each) ? h("span", { class: "words" }, title(each)) : null);
    return h("div", { class: `row ${is_open ? "open" : ""}`, role: "listitem", vars: { "--depth": Math.min(depth, 6) } },
      h("div", { class: "cells" },
        h("span", { class: "what" }, depth ? h("span", { class: "fork", title: `shares ${count(each.shared_tokens)} tokens with ${each.parent}` }, "└") : null, name, badges(each)),
        h("span", { class: "tokens" }, h("b", {}, count(each.tokens)),
          h("span", { class: "meter", role: "img", "aria-label": `${plural(each.tokens, "token")}, ${count(each.parent ? each.shared_tokens : 0)} of them shared with its parent` },
            h("i", { class: "part c-shared", vars: { "--share": `${(100 * (each.parent ? each.shared_tokens : 0)) / most}%` } }),
            h("i", { class: "part c-read", vars: { "--share": `${(100 * (each.tokens - (each.parent ? each.shared_tokens : 0))) / most}%` } }))),
        h("span", { class: "num wide" }, sizes.ram ? bytes(sizes.ram) : "–"),
        h("span", { class: "num wide" }, sizes.disk ? bytes(sizes.disk) : "–"),
        h("span", { class: "num wide" }, ago(each.idle_s)),
        h("span", { class: "num wide" }, count(each.turns))),
      is_open ? details(each) : null);
  }

  function badges(each) {
    const kept = each.kept_until_s ? "kept" : null;
    return [each.live && "live", each.pinned && !kept && "pinned", kept, !bytesOf(each).ram && bytesOf(each).disk && "on disk", each.parked === false && "not parked", each.usable === false && "other model"].filter(Boolean)
      .map((word) => h("span", { class: `badge b-${word.replaceAll(" ", "-")}` }, word));
  }

  function details(each) {
    const path = `/parkd/conversations/${encodeURIComponent(each.id)}`;
    const sizes = bytesOf(each);
    const turns = h("div", { class: "its-turns" });
    its(each, turns);
    const hours = h("select", { id: `hours-${each.id}`, "aria-label": "Keep for" }, KEEP_HOURS.map((each) => h("option", { value: each }, `${each} h`)));
    const run = (words, method, end, body) => async (event) => {
      event.target.disabled = true;
      try {
        await act(method, path + end, body);
        page.say("good", `${words} ${short(each.id)}.`);
      } catch (error) {
        page.say("bad", error.message);
      }
      load();
    };
    const forget = h("button", { type: "button", class: "danger", "data-key": "forget", onclick: (event) => {
      if (forget.dataset.sure) return run("Forgot", "DELETE", "")(event);
      forget.dataset.sure = "1";
      forget.textContent = "Forget it for good?";
    } }, "Forget");
    return h("div", { class: "details" },
      each.first_words ? h("dl", { class: "quotes" },
        each.first_words.system ? [h("dt", {}, "System"), h("dd", {}, each.first_words.system)] : null,
        each.first_words.user ? [h("dt", {}, "Last user message"), h("dd", {}, each.first_words.user)] : null) : null,
      figures(
        [count(each.tokens), "", "Tokens"],
        each.parent && [count(each.shared_tokens), "", `Shared with ${short(each.parent)}`],
        [bytes(sizes.ram ?? 0), "", "In RAM"], [bytes(sizes.disk ?? 0), "", "On disk"],
        [count(Array.isArray(each.checkpoints) ? each.checkpoints.length : each.checkpoints), "", "Checkpoints"],
        [seconds(each.age_s), "", "Age"], [seconds(each.idle_s), "", "Not used for"],
        [count(each.turns), "", "Turns"], each.hits !== undefined && [count(each.hits), "", "Hits"],
        each.saves_s != null && [seconds(each.saves_s), "", "Saves when it returns"],
        sizes.own ? [bytes(sizes.own), "", "Its alone, in RAM"] : null,
        each.kept_until_s && [new Date(1000 * each.kept_until_s).toLocaleTimeString([], { timeStyle: "short" }), "", "Kept until"]),
      h("div", { class: "actions" },
        each.pinned
          ? h("button", { type: "button", "data-key": "pin", onclick: run("Unpinned", "POST", "/unpin", {}) }, "Unpin")
          : h("button", { type: "button", "data-key": "pin", onclick: run("Pinned", "POST", "/pin", {}) }, "Pin"),
        h("span", { class: "joined" }, h("button", { type: "button", "data-key": "keep", onclick: (event) => run("Keeping", "POST", "/keep", { for_s: 3600 * Number(hours.value) })(event) }, "Keep for"), hours),
        sizes.ram ? h("button", { type: "button", "data-key": "disk", onclick: run("Moved to disk:", "POST", "/disk", {}) }, "Move to disk") : null,
        forget),
      turns);
  }

  async function its(each, place) {
    try {
      if (page.state() && !page.state().keeps_ledger) throw new Error("none");
      const { turns } = await get(`/parkd/turns?conversation=${encodeURIComponent(each.id)}&limit=${TURNS_SHOWN}`);
      fill(place, h("h3", {}, "Its turns"), turns.length ? turns.map((turn) => turnRow(turn)) : h("p", { class: "quiet" }, "None is in the ledger."));
    } catch {
      fill(place, h("p", { class: "quiet" }, "The server keeps no ledger of turns."));
    }
  }

  function opened() {
    return decodeURIComponent(location.hash.split("/")[2] ?? "");
  }

  load();
  return {
    changed(state) {
      const at = `${state.running.map((turn) => turn.request_id)}|${state.seats.map((seat) => seat.conversation)}|${state.budget?.conversations}`;
      if (view.at && at !== view.at) load();
      view.at = at;
    },
    moved() { view.open = opened(); draw(); },
    close() { clearTimeout(view.timer); },
  };
}
