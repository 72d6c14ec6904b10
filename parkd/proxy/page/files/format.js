// Numbers for people: aligned, with their unit, and no more digits than they are worth.

const whole = new Intl.NumberFormat("en");
const one = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const money = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const KIB = 1024;

export const NONE = "–";
export const count = (number) => (number === null || number === undefined ? NONE : whole.format(Math.round(number)));
export const decimal = (number) => (number === null || number === undefined ? NONE : one.format(number));
export const price = (number) => money.format(number);
export const percent = (share) => `${whole.format(Math.round(100 * share))} %`;

export function bytes(size) {
  if (size === null || size === undefined) return NONE;
  if (size < KIB) return `${count(size)} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let power = Math.min(units.length - 1, Math.floor(Math.log(size) / Math.log(KIB)) - 1);
  if (size / KIB ** (power + 1) >= 1023.5 && power < units.length - 1) power += 1;
  const scaled = size / KIB ** (power + 1);
  return `${scaled < 100 ? one.format(scaled) : whole.format(Math.round(scaled))} ${units[power]}`;
}

export function seconds(time) {
  if (time === null || time === undefined) return NONE;
  if (time < 10) return `${one.format(time)} s`;
  if (time < 120) return `${whole.format(Math.round(time))} s`;
  if (time < 5400) return `${whole.format(Math.round(time / 60))} min`;
  if (time < 172800) return `${one.format(time / 3600)} h`;
  return `${whole.format(Math.round(time / 86400))} days`;
}

export const ago = (time) => (time === null || time === undefined ? NONE : time < 2 ? "now" : time < 10 ? `${Math.round(time)} s ago` : `${seconds(time)} ago`);
/** An id as short as it may be: what is random in it is cut. */
export const short = (id) => (/^[0-9a-f]{16,}/.test(id) ? id.slice(0, 8) : id);
export const plural = (number, word, many = `${word}s`) => `${count(number)} ${number === 1 ? word : many}`;
export const clock = (unix) => new Date(1000 * unix).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
