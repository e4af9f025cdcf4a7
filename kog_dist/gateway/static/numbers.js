/** Numbers as text. All are set in tabular figures, so that a change of digits moves nothing. */

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const NOTHING = "–";

/** @param {number | null | undefined} value */
export function count(value) {
  return Number.isFinite(value) ? whole.format(/** @type {number} */ (value)) : NOTHING;
}

/** Tokens per second: whole from 100 on. @param {number | null | undefined} value */
export function rate(value) {
  if (!Number.isFinite(value)) return NOTHING;
  return /** @type {number} */ (value) >= 99.95 ? whole.format(/** @type {number} */ (value)) : /** @type {number} */ (value).toFixed(1);
}

/** A duration in the unit that suits it. @param {number | null | undefined} ms */
export function duration(ms) {
  if (typeof ms !== "number" || !Number.isFinite(ms)) return NOTHING;
  if (ms < 0.9995) return `${Math.round(ms * 1000)} µs`;
  if (ms < 99.95) return `${ms.toFixed(ms < 9.995 ? 2 : 1)} ms`;
  return ms < 999.5 ? `${Math.round(ms)} ms` : seconds(ms);
}

/** @param {number} ms */
export function seconds(ms) {
  return `${(ms / 1000).toFixed(ms < 99_950 ? 2 : 0)} s`;
}

/** A number of parameters. @param {number} value */
export function size(value) {
  const [unit, letter] = value >= 999.5e6 ? [1e9, "B"] : [1e6, "M"];
  return `${(value / unit).toPrecision(3)} ${letter}`;
}

/** Bytes per second. @param {number} value */
export function bandwidth(value) {
  if (value >= 1e12) return `${(value / 1e12).toFixed(2)} TB/s`;
  return value >= 1e9 ? `${(value / 1e9).toFixed(1)} GB/s` : `${(value / 1e6).toFixed(0)} MB/s`;
}
