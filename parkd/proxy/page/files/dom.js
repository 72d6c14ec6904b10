// Builds elements. Text is only ever set as text, so nothing that a prompt contains can become markup.

const NS = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "rect", "line", "text", "g", "title"]);

/** An element. `props`: attributes; `class`; `on…` handlers; `data` of a bar as `style` variables; null leaves one out. */
export function h(tag, props, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(NS, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, number] of Object.entries(value)) element.style.setProperty(key, number);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/** Replaces what is in `element`. The focus stays with the element of the same `data-key`. */
export function fill(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  const key = focused?.closest("[data-key]")?.dataset.key;
  element.replaceChildren();
  add(element, children);
  if (key && !element.contains(document.activeElement)) {
    element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
  }
}

export function section(title, ...children) {
  return h("section", {}, h("h2", {}, title), ...children);
}

/** A table that scrolls by itself where it is too wide. `columns`: [title, class]; `rows`: lists of cells. */
export function table(label, columns, rows) {
  const head = columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title));
  const body = rows.map((cells) =>
    h("tr", {}, cells.map((cell, i) => h(i ? "td" : "th", { scope: i ? null : "row", class: columns[i][1] }, cell))),
  );
  return h("div", { class: "scroll", role: "region", "aria-label": label, tabindex: 0 },
    h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

export function empty(title, ...words) {
  return h("div", { class: "empty" }, h("p", { class: "lead" }, title), words.length ? h("p", {}, ...words) : null);
}

/** Figures side by side: [value, unit, label]. */
export function figures(...each) {
  return h("dl", { class: "figures" },
    each.filter(Boolean).map(([value, unit, label]) =>
      h("div", {}, h("dt", {}, label), h("dd", {}, h("b", {}, value), unit ? ` ${unit}` : ""))));
}

/** A bar of parts, [name, amount, kind], out of `total`, and its legend. */
export function bar(label, parts, total, show, rest) {
  const shown = parts.filter(([, amount]) => amount > 0);
  const sum = shown.reduce((all, [, amount]) => all + amount, 0);
  const whole = Math.max(total, sum, 1);
  const words = shown.map(([name, amount]) => `${name} ${show(amount)}`).join(", ");
  const left = whole - sum;
  return h("div", { class: "bar-figure" },
    h("div", { class: "bar", role: "img", "aria-label": `${label}: ${words || "nothing"}` },
      shown.map(([, amount, kind]) => h("i", { class: `part ${kind}`, vars: { "--share": `${(100 * amount) / whole}%` } }))),
    h("ul", { class: "legend" },
      shown.map(([name, amount, kind]) =>
        h("li", {}, h("i", { class: `swatch ${kind}`, "aria-hidden": "true" }), h("span", {}, name), h("b", {}, show(amount)))),
      rest && left > 0 ? h("li", {}, h("i", { class: "swatch", "aria-hidden": "true" }), h("span", {}, rest), h("b", {}, show(left))) : null));
}

/** Text that can be copied. */
export function code(label, text) {
  const button = h("button", { type: "button", class: "small", "aria-label": `Copy: ${label}`, onclick: copy }, "Copy");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(block);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }
  const block = h("code", {}, text);
  return h("div", { class: "code" }, h("pre", { tabindex: 0, "aria-label": label }, block), button);
}
