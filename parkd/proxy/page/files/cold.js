// What cold reads cost: by cause, by client, by day, turn by turn, and the rules that would prevent them.

import { act, get } from "./api.js";
import { code, empty, figures, fill, h, section } from "./dom.js";
import { count, decimal, plural, price, seconds } from "./format.js";
import { causeWords, turnRow } from "./turns.js";

const SPANS = { "24h": "24 hours", "7d": "7 days", "30d": "30 days" };
const TURNS_SHOWN = 100;

export function open(root, page) {
  const view = { span: "7d", at: "", begun: false };
  const choice = h("div", { class: "tools" }, h("fieldset", { class: "choice" }, h("legend", {}, "Over the last"), Object.entries(SPANS).map(([name, words]) =>
    h("label", {}, h("input", { type: "radio", name: "span", value: name, checked: name === view.span, onchange: () => { view.span = name; load(); } }), words))));
  const body = h("div");
  root.append(choice, body);

  function begin() {
    view.begun = true;
    load();
  }

  async function load() {
    const span = view.span;
    if (!page.state().keeps_ledger) return fill(body, empty("This server keeps no ledger.", "It was started with --ledger off, or its file could not be used, which its log explains."));
    try {
      const [bill, told] = await Promise.all([get(`/parkd/bill?since=${span}`), get(`/parkd/turns?since=${span}&limit=${TURNS_SHOWN}`)]);
      if (span === view.span) draw(bill, told.turns);
    } catch (error) {
      fill(body, error.status === 404 ? empty("This server keeps no ledger.", error.message) : empty("The ledger could not be read.", error.message));
    }
  }

  function draw(bill, turns) {
    const { total } = bill;
    if (!total.turns) return fill(body, empty("No turn ended in this time.", "What each turn reads again, and why, shows here. ", h("a", { href: "#/try" }, "Try one")));
    const cold = turns.filter((turn) => turn.needless_tokens > 0);
    const share = total.prompt_tokens ? Math.round((100 * total.reused_tokens) / total.prompt_tokens) : 0;
    fill(body,
      figures([seconds(total.needless_s), "", "Spent reading again"], [count(total.needless_tokens), "tokens", "Read again"],
        total.kwh !== undefined && [total.kwh < 0.1 ? total.kwh.toPrecision(2) : decimal(total.kwh), "kWh", "Energy"], total.money !== undefined && [price(total.money), "", "Cost"],
        [`${share} %`, `of ${plural(total.turns, "turn")}`, "Reused of all prompt tokens"]),
      bill.rules.length ? section("What would prevent it", bill.rules.map(rule)) : null,
      section("Why", bars(bill.by_cause, (each) => causeWords(each.cause))),
      section("By client", bars(bill.by_client, (each) => each.client || "not named")),
      section("By day", days(bill.by_day)),
      section("Turns", cold.length ? cold.map((turn) => turnRow(turn)) : h("p", { class: "quiet" }, "None of the last turns read anything again that was known.")));
  }

  if (page.state()) begin();
  else fill(body, h("p", { class: "quiet" }, "Asking the server…"));
  return {
    changed(state) {
      if (!view.begun) begin(); // only the state tells whether there is a ledger to ask
      const at = state.running.map((turn) => turn.request_id).join();
      if (view.at && at !== view.at && !body.querySelector("details[open]")) load();
      view.at = at || " ";
    },
  };
}

function bars(rows, name) {
  const sorted = rows.filter((each) => each.needless_tokens > 0).sort((one, other) => other.needless_s - one.needless_s || other.needless_tokens - one.needless_tokens);
  if (!sorted.length) return h("p", { class: "quiet" }, "Nothing was read again that was known.");
  const most = Math.max(...sorted.map((each) => each.needless_s), 1e-9);
  return h("ul", { class: "bars" }, sorted.map((each) =>
    h("li", {}, h("span", { class: "label" }, name(each)), h("span", { class: "track", "aria-hidden": "true" }, h("i", { class: "part c-cold", vars: { "--share": `${(100 * each.needless_s) / most}%` } })),
      h("b", { class: "num" }, seconds(each.needless_s)), h("span", { class: "num quiet" }, plural(each.needless_tokens, "token")))));
}

function days(rows) {
  const most = Math.max(...rows.map((each) => each.needless_s), 1e-9);
  return h("ol", { class: "days" }, [...rows].sort((one, other) => (one.day < other.day ? -1 : 1)).map((each) =>
    h("li", {}, h("b", {}, each.needless_s ? seconds(each.needless_s) : "–"), h("i", { class: "c-cold", "aria-hidden": "true", vars: { "--share": `${(100 * each.needless_s) / most}%` } }), h("span", {}, each.day.slice(5)))));
}

/** A rewrite rule that would prevent cold reads, as lines for the rules file; it can be tried, and switched on. */
function rule(each) {
  const result = h("p", { class: "quiet", role: "status" });
  const button = (words, path, tell) => h("button", { type: "button", onclick: async (event) => {
    event.target.disabled = true;
    try {
      fill(result, tell(await act("POST", path, { rule: each.rule })));
    } catch (error) {
      fill(result, error.message);
    }
    event.target.disabled = false;
  } }, words);
  return h("div", { class: "rule" },
    h("p", {}, h("b", {}, seconds(each.needless_s)), ` of ${plural(each.turns, "turn")}, ${plural(each.needless_tokens, "token")}: this rule makes their beginnings equal. Put it in the file of --rewrite-rules.`),
    code("Rewrite rule", each.line),
    h("div", { class: "actions" },
      button("Try it", "/parkd/rules/try", (told) => `It would have saved ${plural(told.saved_tokens, "token")} in the last ${plural(told.requests, "request")}.`),
      button("Switch it on", "/parkd/rules", () => "It is on until the server stops.")),
    result);
}
