// Numbers as people read them. Nothing there: an en dash.

const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : NONE);

/** Three digits that matter. */
export function figure(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 100) return count(value);
  return value.toFixed(size >= 10 ? 1 : 2);
}

export function ms(value) {
  if (!isNumber(value)) return NONE;
  return Math.abs(value) >= 1000 ? seconds(value / 1000) : `${figure(value)} ms`;
}

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value < 120) return `${Number.isInteger(value) ? value : figure(value)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

/** How every figure says what time it is of. */
export const lastTime = (value) => `last ${seconds(Math.round(value))}`;

const two = (number) => String(number).padStart(2, "0");

/** Of a moment in seconds since 1970, in the time zone of who reads. */
export function clock(at, withSeconds = true) {
  const time = new Date(at * 1000);
  return `${two(time.getHours())}:${two(time.getMinutes())}${withSeconds ? `:${two(time.getSeconds())}` : ""}`;
}

export const rate = (value) => (isNumber(value) ? `${figure(value)} tokens/s` : NONE);

export const percent = (share) => (isNumber(share) ? `${figure(100 * share)} %` : NONE);

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  let at = 0;
  for (; Math.abs(value) >= 1024 && at < 4; at++) value /= 1024;
  return `${at ? figure(value) : count(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][at]}`;
}

/** Ids of requests in a text, by their last digits and, where it is not the first, the sequence. */
export const shortIds = (text) =>
  text.replace(/\b(?:chat)?cmpl-[0-9a-f]{26}([0-9a-f]{6})(?:-0\b)?/g, "…\u2060$1").replace(/(…\u2060[0-9a-f]{6})-(?=\d)/g, "$1\u2011");
