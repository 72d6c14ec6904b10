// What memory holds, what more would fit, and what another budget would hold.

import { get } from "./api.js";
import { bar, empty, figures, fill, h, section, table } from "./dom.js";
import { bytes, count, plural } from "./format.js";

const MIB = 1 << 20;
const RELOAD_S = 5;
const WAIT_MS = 150;
const KINDS = {
  weights: "c-weights", arenas: "c-arenas", rows: "c-arenas", "fixed state": "c-arenas-2", windows: "c-arenas-2", index: "c-arenas-2",
  checkpoints: "c-checkpoints", parked: "c-parked", "being written": "c-writing", remembered: "c-remembered", other: "c-other",
};
const kind = (name) => KINDS[name] ?? "c-other-2";
const TIER_KINDS = { rows: "c-parked", checkpoints: "c-checkpoints", "being written": "c-writing", records: "c-remembered", "kept for reuse": "c-other" };
const parts = (list) => list.map(({ name, bytes: size }) => [name, size, kind(name)]);

export function open(root) {
  const places = { process: h("div"), devices: h("div"), parked: h("div"), holds: h("div"), refusals: h("div") };
  root.append(...Object.values(places));
  const view = { timer: 0, shown: null, asked_mib: null };

  async function load() {
    clearTimeout(view.timer);
    try {
      const asked = view.asked_mib === null ? "" : `?ram_mib=${view.asked_mib}`;
      draw(await get(`/parkd/budget${asked}`));
    } catch (error) {
      if (!view.shown) fill(places.process, empty("The budget could not be read.", error.message));
    }
    view.timer = setTimeout(load, 1000 * RELOAD_S);
  }

  function draw(told) {
    view.shown = told;
    const { process } = told;
    fill(places.process, process ? section("This process",
      figures([bytes(process.resident_bytes), "", "In main memory"], [bytes(process.free_bytes), "", "Free on the machine"], [bytes(process.total_bytes), "", "Of the machine"]),
      bar("Main memory of the process", parts(process.parts), process.resident_bytes + process.untouched_bytes, bytes),
      process.untouched_bytes ? h("p", { class: "quiet" }, `${bytes(process.untouched_bytes)} of this is reserved, or mapped from a file, and not in memory.`) : null) : null);
    fill(places.devices, told.devices.length ? section("Devices", told.devices.map((device) => {
      const sum = device.parts.reduce((all, part) => all + part.bytes, 0);
      return h("div", { class: "device" }, h("h3", {}, device.device, h("span", { class: "quiet" }, ` layers ${device.first_layer}–${device.end_layer - 1} · ${bytes(sum)}`)),
        bar(device.device, parts(device.parts), sum, bytes));
    })) : null);
    fill(places.parked, told.ram ? section("Parked conversations",
      tier("RAM", told.ram, told.ram.parts.map((part) => [part.name, part.bytes, TIER_KINDS[part.name] ?? "c-other-2"])),
      told.disk ? tier("Disk", told.disk, [["files", told.disk.used_bytes, "c-parked"]]) : h("p", { class: "quiet" }, "There is no disk budget: what leaves RAM is read again (--conversation-cache-disk-mib).")) : null);
    if (told.holds) holds(told);
    else fill(places.holds, empty("Parking is off.", "A conversation that leaves is read again when it returns (--conversation-cache-mib)."));
    fill(places.refusals, told.is_operator && told.holds ? section("Not parked", told.refusals.length
      ? table("Refusals", [["Why", ""], ["Turns", "num"]], told.refusals.map((each) => [each.words, count(each.count)]))
      : h("p", { class: "quiet" }, "Nothing was refused since the server started.")) : null);
  }

  function tier(name, told, shown) {
    return h("div", { class: "device" },
      h("h3", {}, name, h("span", { class: "quiet" }, ` ${bytes(told.used_bytes)} of ${bytes(told.limit_bytes)} · ${plural(told.conversations, "conversation")}`,
        told.pinned ? ` · ${told.pinned} pinned` : "", told.evictions ? ` · ${plural(told.evictions, "eviction")}` : "")),
      bar(name, shown, told.limit_bytes, bytes, "free"));
  }

  function holds(told) {
    const now = told.holds;
    const asked = told.what_if;
    if (!places.holds.hasChildNodes()) {
      const most = Math.max(4 * now.budget_bytes, told.process?.total_bytes ?? 0, 256 * MIB) / MIB;
      const slider = h("input", { type: "range", id: "what-if", min: 0, max: 1000, step: 1, value: to(now.budget_bytes / MIB, most), "data-key": "what-if" });
      const number = h("input", { type: "number", id: "what-if-mib", min: 0, max: 1 << 30, step: 1, value: Math.round(now.budget_bytes / MIB), "aria-label": "Budget in MiB" });
      const ask = (mib) => { view.asked_mib = Math.max(0, Math.min(1 << 30, Math.round(mib) || 0)); clearTimeout(view.timer); view.timer = setTimeout(load, WAIT_MS); };
      slider.addEventListener("input", () => { const mib = from(Number(slider.value), most); number.value = mib; slider.setAttribute("aria-valuetext", `${count(mib)} MiB`); ask(mib); });
      number.addEventListener("input", () => { slider.value = to(Number(number.value), most); ask(Number(number.value)); });
      view.table = h("div");
      fill(places.holds, section("What fits",
        h("div", { class: "what-if" }, h("label", { for: "what-if" }, "If the budget were"), slider, h("span", { class: "joined" }, number, h("span", {}, "MiB"))), view.table));
    }
    const words = told.lengths_are_seen ? "Conversations as long as those parked now (the middle one and the longest)." : "Conversations of some lengths.";
    fill(view.table,
      table("What fits", [["Conversations of", ""], ["Bytes each", "num wide"], ["Fit in all", "num"], ["Free now for", "num"], ...(asked ? [["Would fit", "num"]] : [])],
        now.fits.map((each, i) => [plural(each.tokens, "token"), bytes(each.bytes), count(each.conversations), each.more === null ? "–" : `${count(each.more)} more`, ...(asked ? [h("b", {}, count(asked.fits[i]?.conversations))] : [])])),
      h("p", { class: "quiet" }, words, ` The longest single conversation that is parked whole has ${count(now.longest_tokens)} tokens`, asked ? `; with ${bytes(asked.budget_bytes)} it would have ${count(asked.longest_tokens)}.` : ".", " The figures are those of parkd plan."));
  }

  load();
  return { close() { clearTimeout(view.timer); } };
}

// The slider is finer where budgets are small.
const from = (place, most) => Math.round((place / 1000) ** 3 * most);
const to = (mib, most) => Math.round(1000 * Math.cbrt(mib / most));
