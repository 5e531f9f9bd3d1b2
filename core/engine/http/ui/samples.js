// What the engine said of itself over time: one sample a second, as columns.

import { getJson } from "./api.js";

export const MOST = 20_000;
const TRIM = 1000;

export const COLUMNS = ["ttft50", "ttft95", "ttft99", "itl50", "itl95", "itl99", "output", "prompt", "running", "waiting", "kv"];

export class Samples {
  constructor() {
    this.at = []; // seconds since 1970
    this.columns = Object.fromEntries(COLUMNS.map((name) => [name, []]));
  }

  add(at, values) {
    this.at.push(at);
    for (const name of COLUMNS) this.columns[name].push(values[name] ?? null);
    if (this.at.length > MOST) {
      this.at.splice(0, TRIM);
      for (const name of COLUMNS) this.columns[name].splice(0, TRIM);
    }
  }

  /** As uPlot takes them. */
  data(names) {
    return [this.at, ...names.map((name) => this.columns[name])];
  }
}

/** Reads one sample after the other; rates are those since the one before. */
export class Sampler {
  constructor() {
    this.before = null;
    this.latency = null;
  }

  /** Throws where the engine does not answer. */
  async read() {
    const [latency, stats, counts] = await Promise.all([getJson("engine/latency"), getJson("engine/stats"), this.counts()]);
    this.latency = latency;
    const now = performance.now() / 1000;
    const rate = (name) => {
      const change = counts && this.before?.counts ? counts[name] - this.before.counts[name] : -1;
      return change >= 0 ? change / (now - this.before.now) : null; // less than before: another engine
    };
    const sample = {
      output: rate("output"),
      prompt: rate("prompt"),
      running: stats.running,
      waiting: stats.waiting,
      kv: Math.max(0, ...stats.blocks.map((group) => group.leased / Math.max(1, group.total))) * 100,
    };
    for (const [name, key] of [["ttft", "ttft_ms"], ["itl", "itl_ms"]]) {
      const { p50, p95, p99 } = latency[key];
      Object.assign(sample, { [`${name}50`]: p50, [`${name}95`]: p95, [`${name}99`]: p99 });
    }
    this.before = { now, counts };
    return sample;
  }

  /** Tokens so far, from /engine/counters. */
  async counts() {
    const { metrics } = await getJson("engine/counters");
    const named = Object.fromEntries(metrics.map((metric) => [metric.name, metric]));
    const observed = (name) => named[name].counts.reduce((all, count) => all + count, 0);
    return {
      output: observed("engine_ttft_seconds") + observed("engine_itl_seconds"),
      prompt: named["engine_step_tokens_total"].values.prefill,
    };
  }
}
