// One turn of the ledger: what it reused, what it read, and why. Opens to what the server explains of it.

import { get } from "./api.js";
import { bar, fill, h } from "./dom.js";
import { ago, clock, count, seconds } from "./format.js";
import { cacheWords } from "./now.js";

export const CAUSES = {
  clock: "a clock in the prompt",
  tools: "tools changed or reordered",
  tools_changed: "tools changed",
  tools_reordered: "tools in another order",
  system: "the system message changed",
  system_moved: "the system message moved",
  model: "another model name",
  key: "another key",
  edited: "history edited",
  history_edited: "history edited",
  evicted: "evicted",
  refused: "not parked: refused",
  first: "seen for the first time",
  first_time: "seen for the first time",
};
export const causeWords = (cause) => CAUSES[cause] ?? (cause ?? "not told").replaceAll("_", " ");

/** A turn in one line, which opens. */
export function turnRow(turn) {
  const body = h("div", { class: "turn-body" });
  const when = turn.began ?? turn.at ?? turn.at_s;
  const line = h("summary", {},
    h("span", { class: "when", title: when ? clock(when) : "" }, when ? ago(Date.now() / 1000 - when) : ""),
    h("span", { class: "num" }, h("b", {}, count(turn.reused_tokens)), h("span", { class: "quiet" }, ` of ${count(turn.prompt_tokens)}`)),
    h("span", { class: "cause" }, cacheWords(turn.cache ?? turn.outcome), turn.cause ? h("span", { class: "quiet" }, ` · ${causeWords(turn.cause)}`) : null));
  const box = h("details", { class: "ledger", ontoggle: () => { if (box.open && !body.hasChildNodes()) why(turn, body); } }, line, body);
  return box;
}

async function why(turn, place) {
  const id = turn.request_id ?? turn.id;
  try {
    const told = await get(`/parkd/explain/${encodeURIComponent(id)}`);
    const read = told.prompt_tokens - told.reused_tokens;
    fill(place,
      bar("Prompt", [["reused", told.reused_tokens, "c-reused"], ["read", read, "c-cold"]], told.prompt_tokens, count),
      told.why ? h("p", { class: "why" }, told.why) : h("p", { class: "quiet" }, "Nothing that was known had to be read again."),
      told.divergence ? difference(told.divergence) : null,
      h("p", { class: "quiet" }, "waited ", seconds(told.seconds.wait), " · restored in ", seconds(told.seconds.restore), " · read in ", seconds(told.seconds.read), " · answered in ", seconds(told.seconds.decode)),
      told.rewrites.length ? h("p", { class: "quiet" }, "Rewritten by ", told.rewrites.map((each) => `${each.rule} (${each.places})`).join(", ")) : null);
  } catch (error) {
    fill(place, turn.why ? h("p", { class: "why" }, turn.why) : null, h("p", { class: "quiet" }, error.message));
  }
}

/** Where a prompt left what was known: both texts, the differing piece of each marked. */
export function difference(divergence) {
  const [before, known, now, after] = marked(divergence.known_text ?? "", divergence.text ?? "");
  if (!divergence.text && !divergence.known_text) {
    return h("p", { class: "quiet" }, `The first token that differs is ${count(divergence.token)}, in ${divergence.segment || "the prompt"}. `,
      "Its text is shown only where the server was started with --page-text.");
  }
  const line = (sign, kind, piece) => h("p", { class: `diff ${kind}` }, h("span", { class: "sign" }, sign), h("code", {}, before, h("mark", {}, piece), after));
  return h("div", { class: "difference" },
    h("p", { class: "quiet" }, `Token ${count(divergence.token)}, in ${divergence.segment || "the prompt"}:`),
    line("was", "was", known), line("is", "is", now));
}

/** Splits two texts at what they share: [beginning, middle of one, middle of the other, end]. */
export function marked(one, other) {
  let start = 0;
  while (start < one.length && start < other.length && one[start] === other[start]) start += 1;
  let end = 0;
  while (end < one.length - start && end < other.length - start && one[one.length - 1 - end] === other[other.length - 1 - end]) end += 1;
  return [one.slice(0, start), one.slice(start, one.length - end), other.slice(start, other.length - end), one.slice(one.length - end)];
}
