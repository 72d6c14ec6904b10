// One turn of the ledger: what it reused, what it read, and why.

import { bar, h } from "./dom.js";
import { ago, clock, count, seconds } from "./format.js";
import { cacheWords } from "./now.js";

const WORD = /[\p{L}\p{N}:._-]/u;
const CAUSES = {
  first_time: "seen for the first time",
  clock: "a clock or an id in the prompt",
  tools_reordered: "tools in another order",
  tools: "other tools",
  system_moved: "the system message moved",
  system: "another system message",
  model: "another model name",
  key: "another salt or steering",
  history_edited: "the history was edited",
  template: "the answer came back in other tokens",
  evicted: "evicted",
  refused: "there was no room to park it",
  forgotten: "forgotten on request",
  damage: "parked state was damaged",
  no_checkpoint: "no state to resume from there",
  cheaper: "reading was faster than restoring",
  not_asked: "the request asked for no cache",
};
export const causeWords = (cause) => CAUSES[cause] ?? (cause ? cause.replaceAll("_", " ") : "nothing was lost");
export const clientWords = (turn) => [turn.client, turn.key].filter((each) => each && each !== "-").join(" · ") || "not named";

/** A turn in one line, which opens. `more`: what else belongs to it. */
export function turnRow(turn, more) {
  const body = h("div", { class: "turn-body" });
  const fill = () => { if (!body.hasChildNodes()) body.append(...[...told(turn), more?.(turn)].filter(Boolean)); };
  return h("details", { class: "ledger", ontoggle: fill },
    h("summary", {},
      h("span", { class: "when", title: clock(turn.at_s) }, ago(Date.now() / 1000 - turn.at_s)),
      h("span", { class: "num" }, h("b", {}, count(turn.reused_tokens)), h("span", { class: "quiet" }, ` of ${count(turn.prompt_tokens)}`)),
      h("span", { class: "cause" }, turn.cache ? cacheWords(turn.cache) : "did not run", h("span", { class: "quiet" }, turn.cause ? ` · ${causeWords(turn.cause)}` : "",
        turn.needless_tokens ? ` · ${seconds(turn.needless_s)} lost` : ""))),
    body);
}

function told(turn) {
  const needed = Math.max(0, turn.read_tokens - turn.needless_tokens);
  return [
    bar("Prompt", [["reused", turn.reused_tokens, "c-reused"], ["read again", turn.needless_tokens, "c-cold"], ["read", needed, "c-read"]], turn.prompt_tokens, count),
    turn.why ? h("p", { class: "why" }, turn.why) : h("p", { class: "quiet" }, "All that was known was reused."),
    turn.differs ? difference(turn.differs) : null,
    h("p", { class: "quiet" }, h("code", {}, turn.request_id), ` ${clientWords(turn)} · waited ${seconds(turn.seconds.wait)} · restored in ${seconds(turn.seconds.restore)} · read in ${seconds(turn.seconds.read)} · answered ${count(turn.output_tokens)} tokens in ${seconds(turn.seconds.decode)}`),
  ];
}

/** Where a prompt left what was known: both texts, the differing piece of each marked. */
function difference(differs) {
  const place = h("p", { class: "quiet" }, `It differs from token ${count(differs.token)} on, in ${differs.segment || "the prompt"}. `,
    differs.text || differs.known_text ? "" : "The text around is told to the key that sent it, where the server was started with --page-text.");
  if (!differs.text && !differs.known_text) return place;
  const [before, known, now, after] = marked(differs.known_text, differs.text);
  const line = (sign, piece) => h("p", { class: "diff" }, h("span", { class: "sign" }, sign), h("code", {}, before, h("mark", {}, piece), after));
  return h("div", { class: "difference" }, place, line("was", known), line("is", now));
}

/** Splits two texts at what they share: [beginning, middle of one, middle of the other, end]. */
export function marked(one, other) {
  let start = 0;
  while (start < one.length && start < other.length && one[start] === other[start]) start += 1;
  let end = 0;
  while (end < one.length - start && end < other.length - start && one[one.length - 1 - end] === other[other.length - 1 - end]) end += 1;
  while (start > 0 && WORD.test(one[start - 1])) start -= 1; // whole words, so that 09:41 is one piece
  while (end > 0 && WORD.test(one[one.length - end])) end -= 1;
  return [one.slice(0, start), one.slice(start, one.length - end), other.slice(start, other.length - end), one.slice(one.length - end)];
}
