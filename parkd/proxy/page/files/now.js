// What runs, waits and is live at this moment, and the last turns.

import { get } from "./api.js";
import { bar, empty, figures, fill, h, section, table } from "./dom.js";
import { ago, bytes, count, decimal, plural, seconds, short } from "./format.js";

const PHASES = { starting: "Finding its state", reading: "Reading its prompt", answering: "Answering", paused: "Paused" };
const CACHE = {
  live: "was live", "restored-ram": "restored from RAM", "restored-disk": "restored from disk", cold: "read cold",
};
export const cacheWords = (cache) => CACHE[cache] ?? cache ?? "not known yet";
const LAST_TURNS = 12;

export function open(root, page) {
  const parts = { running: h("div"), waiting: h("div"), seats: h("div"), budget: h("div"), last: h("div") };
  root.append(...Object.values(parts));
  let seen = "";

  function changed(state) {
    fill(parts.running, section("Running", state.running.length ? state.running.map(running) : idle(state), state.from_disk ? fromDisk(state.from_disk) : null));
    fill(parts.waiting, state.waiting.length ? section("Queue", queue(state.waiting)) : null);
    // Of one seat there is nothing to tell while a turn uses it: its tokens are told with the turn.
    fill(parts.seats, state.seats.length > (state.running.length ? 1 : 0) ? section("Live", seats(state)) : null);
    fill(parts.budget, state.budget ? section("Parked", tiers(state.budget)) : null);
    const at = state.running.map((turn) => turn.request_id).join();
    if (at !== seen || !parts.last.hasChildNodes()) {
      seen = at;
      last();
    }
  }

  async function last() {
    if (!page.state()?.keeps_ledger) return;
    const { turns } = await get(`/parkd/turns?limit=${LAST_TURNS}`).catch(() => ({ turns: [] }));
    fill(parts.last, turns.length ? section("Last turns", lastTurns(turns)) : null);
  }

  if (page.state()) changed(page.state());
  else root.append(h("p", { class: "quiet loading" }, "Asking the server…"));
  return { changed: (state) => { root.querySelector(".loading")?.remove(); changed(state); } };
}

function idle(state) {
  return empty("Nothing runs.",
    state.is_operator ? "A turn shows here while it reads its prompt and answers. " : "No turn of your key runs. ",
    h("a", { href: "#/try" }, "Try one"), ", or point an agent here.");
}

function running(turn) {
  const { reading, answer } = turn;
  const left = reading ? reading.total_tokens - reading.read_tokens : 0;
  const words = answer ? [count(answer.tokens), ` token${answer.tokens === 1 ? "" : "s"} so far`]
    : reading ? [count(reading.read_tokens), ` of ${count(reading.total_tokens)} tokens`] : [seconds(turn.runs_s), ""];
  return h("article", { class: "turn" },
    h("header", {}, h("h3", {}, PHASES[turn.phase] ?? turn.phase), h("p", { class: "quiet" }, turn.client === "-" ? "" : turn.client, " ", h("code", {}, turn.request_id))),
    h("p", { class: "big" }, h("b", {}, words[0]), words[1]),
    bar("Prompt", [
      ["reused", turn.reused_tokens, "c-reused"],
      ["read", answer ? turn.prompt_tokens - turn.reused_tokens : reading?.read_tokens ?? 0, "c-read"],
    ], turn.prompt_tokens, count, left && !answer ? "to read" : null),
    figures(
      turn.phase === "reading" && [decimal(reading?.tokens_per_s), "tokens/s", "Speed"],
      turn.phase === "reading" && [seconds(reading?.left_s), "", "Left"],
      turn.phase === "answering" && [decimal(answer.tokens_per_s), "tokens/s", "Speed"],
      turn.phase === "answering" && [seconds(answer.first_token_s), "", "To the first token"],
      [cacheWords(turn.cache), "", "Its state"],
      [seconds(turn.runs_s), "", "Runs for"]),
    turn.why ? h("p", { class: "why" }, turn.why) : null);
}

function fromDisk(told) {
  return h("div", { class: "device" }, h("h3", {}, "Reading a conversation from disk", h("span", { class: "quiet" }, ` ${bytes(told.read_bytes)} of ${bytes(told.total_bytes)}`, told.left_s === null ? "" : ` · ${seconds(told.left_s)} left`)),
    bar("From disk", [["read", told.read_bytes, "c-parked"]], told.total_bytes, bytes, "to read"));
}

function queue(waiting) {
  return table("Queue", [["Place", "num"], ["Request", ""], ["Client", "wide"], ["Prompt", "num"], ["Waits for", "num"]],
    waiting.map((turn) => [turn.place ?? "–", h("code", {}, turn.request_id), turn.client, count(turn.prompt_tokens), seconds(turn.waits_s)]));
}

function seats(state) {
  return h("ul", { class: "seats" }, state.seats.map((seat) =>
    h("li", {},
      h("div", {}, h("b", {}, seat.tokens ? count(seat.tokens) : "empty"), seat.tokens ? ` of ${count(state.context_tokens)} tokens` : "",
        h("span", { class: "quiet" }, state.seats.length > 1 ? ` seat ${seat.seat}` : "",
          seat.conversation ? [" · parked as ", h("a", { href: `#/conversations/${encodeURIComponent(seat.conversation)}` }, h("code", {}, short(seat.conversation)))] : seat.tokens ? " · not parked yet" : "")),
      bar("Context", [["live", seat.tokens, "c-reused"]], state.context_tokens, count))));
}

export function tiers(budget) {
  const rows = [["RAM", budget.ram], ["Disk", budget.disk]].filter(([, tier]) => tier);
  return h("div", { class: "tiers" },
    h("p", {}, h("a", { href: "#/conversations" }, plural(budget.conversations, "conversation")), " in the ", h("a", { href: "#/budget" }, "budget"), "."),
    rows.map(([name, tier]) => h("div", {},
      h("p", {}, name, " ", h("b", {}, bytes(tier.used_bytes)), h("span", { class: "quiet" }, ` of ${bytes(tier.limit_bytes)}`)),
      bar(name, [["used", tier.used_bytes, "c-parked"]], tier.limit_bytes, bytes))));
}

function lastTurns(turns) {
  const now_s = Date.now() / 1000;
  return table("Last turns", [["When", "when"], ["Client", "wide"], ["Prompt", "num"], ["Reused", "num"], ["State", ""], ["Until it answered", "num wide"]],
    turns.map((turn) => [ago(now_s - turn.at_s), turn.client || turn.key || "not named", count(turn.prompt_tokens), count(turn.reused_tokens),
      turn.cache ? cacheWords(turn.cache) : turn.end, seconds(turn.seconds.wait + turn.seconds.restore + turn.seconds.read)]));
}
