// An hour of what an engine served, by periods of a few seconds, as columns. The server keeps it.

import { getJson } from "./api.js";

const RATES = { requests: "requests", errors: "errors", output_tokens: "output", prompt_tokens: "prompt" };

export class History {
  /** `name`: the class of service; empty: all. */
  constructor(name = "") {
    this.name = name;
    this.forget();
  }

  forget() {
    this.at = []; // seconds since 1970
    this.columns = {};
    this.now = 0; // number of the period that is not over yet
    this.periodS = 1;
    this.targets = {};
    this.classes = [];
  }

  /** Asks for what is new. Throws where the server does not answer. */
  async read() {
    const found = await getJson(`engine/history?since=${this.now}&class=${encodeURIComponent(this.name)}`);
    if (found.first !== this.now) this.forget(); // the first answer, or another server's
    const { columns, period_s: periodS } = found;
    const begins = this.at.length ? this.at.at(-1) : Date.now() / 1000 - found.ago_s;
    const count = columns.requests.length;
    this.at.splice(-1, 1, ...Array.from({ length: count }, (_, at) => begins + at * periodS));
    for (const [name, values] of Object.entries(columns)) {
      const kept = name in RATES ? values.map((value, at) => (at === count - 1 ? null : value / periodS)) : values;
      (this.columns[RATES[name] ?? name] ??= []).splice(-1, 1, ...kept);
    }
    Object.assign(this, { now: found.now, periodS, targets: found.targets, classes: found.classes });
  }

  /** Values of the last seconds, without what is not known. */
  last(name, seconds) {
    const count = Math.ceil(seconds / this.periodS) + 1;
    return (this.columns[name] ?? []).slice(-count).filter((value) => value !== null);
  }

  /** As uPlot takes them. */
  data(names) {
    return [this.at, ...names.map((name) => this.columns[name] ?? this.at.map(() => null))];
  }
}
