// How fast an answer comes, from what the server says of it so far.

const WINDOW_MS = 2000;

export class LiveSpeed {
  /** Times in ms on the page's clock. */
  constructor(began) {
    this.began = began;
    this.ttft = null;
    this.tokens = 0;
    this.progress = null;
    this.seen = []; // [ms, tokens so far], of the last two seconds
  }

  prefilled(progress) {
    this.progress = progress;
  }

  /** `tokens`: all output tokens so far; a chunk may bring several, or none. */
  generated(tokens, at) {
    if (tokens <= this.tokens) return;
    this.ttft ??= at - this.began;
    this.tokens = tokens;
    this.seen.push([at, tokens]);
    while (this.seen.length > 2 && this.seen[0][0] < at - WINDOW_MS) this.seen.shift();
  }

  /** Tokens per second over the last two seconds; null before the second token. */
  now(at) {
    const [first, before] = this.seen[0] ?? [at, 0];
    const took = Math.max(at, first) - first;
    return this.tokens > before && took > 0 ? (1000 * (this.tokens - before)) / took : null;
  }
}
