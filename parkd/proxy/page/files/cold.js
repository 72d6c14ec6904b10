// What cold reads cost: by cause, by client, by day, and turn by turn.

import { act, get } from "./api.js";
import { code, empty, figures, fill, h, section } from "./dom.js";
import { count, decimal, price, seconds } from "./format.js";
import { causeWords, turnRow } from "./turns.js";

const SPANS = { "24h": "24 hours", "7d": "7 days", "30d": "30 days" };
const TURNS_SHOWN = 50;

const list = (group, name) => (Array.isArray(group) ? group : Object.entries(group ?? {}).map(([key, each]) => ({ [name]: key, ...each })));
const tokensOf = (each) => each.tokens ?? each.needless_tokens ?? each.lost_tokens ?? 0;
const secondsOf = (each) => each.seconds ?? each.needless_s ?? each.lost_s ?? 0;

export function open(root) {
  const view = { span: "7d" };
  const choice = h("div", { class: "tools" }, h("fieldset", { class: "choice" }, h("legend", {}, "Over the last"), Object.entries(SPANS).map(([name, words]) =>
    h("label", {}, h("input", { type: "radio", name: "span", value: name, checked: name === view.span, onchange: () => { view.span = name; load(); } }), words))));
  const body = h("div");
  root.append(choice, body);

  async function load() {
    try {
      const [bill, told] = await Promise.all([get(`/parkd/bill?since=${view.span}`), get(`/parkd/turns?since=${view.span}&limit=${TURNS_SHOWN}`)]);
      draw(bill, told.turns);
    } catch (error) {
      fill(body, error.status === 404
        ? empty("This server keeps no ledger.", "It was started without one, or does not know it yet.")
        : empty("The ledger could not be read.", error.message));
    }
  }

  function draw(bill, turns) {
    const total = bill.total ?? bill.totals ?? bill;
    if (!turns.length && !tokensOf(total)) {
      return fill(body, empty("Nothing was read that need not have been.", "Turns show here once there are some: what each read again, and why."));
    }
    const cold = turns.filter((turn) => tokensOf(turn) > 0);
    fill(body,
      figures([seconds(secondsOf(total)), "", "Spent reading again"], [count(tokensOf(total)), "tokens", "Read again"],
        total.kwh != null && [decimal(total.kwh), "kWh", "Energy"], total.money != null && [price(total.money), bill.currency ?? "", "Cost"]),
      section("Why", bars(list(bill.by_cause ?? bill.causes, "cause"), (each) => causeWords(each.cause))),
      section("By client", bars(list(bill.by_client ?? bill.clients, "client"), (each) => each.client || "-")),
      section("By day", days(list(bill.by_day ?? bill.days, "day"))),
      cold.length ? section("Turns", cold.map((turn) => h("div", {}, turnRow(turn), turn.rule ? rule(turn) : null))) : null);
  }

  load();
  return {};
}

function bars(rows, name) {
  const sorted = rows.filter((each) => tokensOf(each) > 0).sort((one, other) => secondsOf(other) - secondsOf(one) || tokensOf(other) - tokensOf(one));
  if (!sorted.length) return h("p", { class: "quiet" }, "None.");
  const most = Math.max(...sorted.map(secondsOf), 1e-9);
  return h("ul", { class: "bars" }, sorted.map((each) =>
    h("li", {}, h("span", { class: "label" }, name(each)), h("span", { class: "track", "aria-hidden": "true" }, h("i", { class: "part c-cold", vars: { "--share": `${(100 * secondsOf(each)) / most}%` } })),
      h("b", { class: "num" }, seconds(secondsOf(each))), h("span", { class: "num quiet" }, `${count(tokensOf(each))} tokens`))));
}

function days(rows) {
  if (!rows.length) return h("p", { class: "quiet" }, "None.");
  const most = Math.max(...rows.map(secondsOf), 1e-9);
  return h("ol", { class: "days" }, [...rows].sort((one, other) => (one.day < other.day ? -1 : 1)).map((each) =>
    h("li", {}, h("b", {}, secondsOf(each) ? seconds(secondsOf(each)) : "–"), h("i", { class: "c-cold", "aria-hidden": "true", vars: { "--share": `${(100 * secondsOf(each)) / most}%` } }), h("span", {}, String(each.day).slice(5)))));
}

/** The rewrite rule that would prevent a cold read: shown, tried, and given as lines for the rules file. */
function rule(turn) {
  const words = [`[[rule]]`, ...Object.entries(turn.rule).map(([name, value]) => `${name} = ${JSON.stringify(value)}`)].join("\n");
  const result = h("p", { class: "quiet", role: "status" });
  const button = h("button", { type: "button", class: "small", onclick: trial }, "Try it on this request");
  async function trial() {
    button.disabled = true;
    try {
      const told = await act("POST", `/parkd/turns/${encodeURIComponent(turn.request_id)}/trial`, { rule: turn.rule });
      fill(result, `It would have saved ${count(told.saved_tokens)} of ${count(turn.prompt_tokens)} tokens.`);
    } catch (error) {
      fill(result, error.message);
    }
    button.disabled = false;
  }
  return h("div", { class: "rule" }, h("p", {}, "A rule that would prevent it (a line for --rewrite-rules):"), code("Rewrite rule", words), button, result);
}
