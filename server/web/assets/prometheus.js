// The text that /metrics answers with, as numbers to ask for by name and labels.

const LINE = /^onequeue_(\w+?)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export function parse(text, at) {
  const series = new Map(); // by name: [{labels, value}]
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const [, name, labels = "", value] = found;
    const named = Object.fromEntries([...labels.matchAll(LABEL)].map(([, key, each]) => [key, each]));
    if (!series.has(name)) series.set(name, []);
    series.get(name).push({ labels: named, value: Number(value) });
  }
  return new Sample(series, at);
}

const any = () => true;

// All that the server said at one time, in seconds.
class Sample {
  constructor(series, at) {
    this.series = series;
    this.at = at;
  }

  has(name) {
    return this.series.has(name);
  }

  labels(name, fits = any) {
    return (this.series.get(name) ?? []).map(each => each.labels).filter(fits);
  }

  sum(name, fits = any) {
    const found = (this.series.get(name) ?? []).filter(each => fits(each.labels));
    return found.reduce((total, { value }) => total + value, 0);
  }

  // How much a counter has grown; without an earlier sample, since the start.
  since(then, name, fits = any) {
    return this.sum(name, fits) - (then?.sum(name, fits) ?? 0);
  }

  mean(histogram, then = null) {
    return this.since(then, `${histogram}_sum`) / this.since(then, `${histogram}_count`);
  }

  // Within the bucket that it falls into, as if that were filled evenly; NaN where nothing was.
  percentile(histogram, share, then = null, fits = any) {
    const name = `${histogram}_bucket`;
    const limits = [...new Set(this.labels(name, fits).map(each => each.le))].sort((a, b) => bound(a) - bound(b));
    const upTo = le => this.since(then, name, labels => labels.le === le && fits(labels));
    const wanted = share * (limits.length ? upTo(limits.at(-1)) : 0);
    let [below, low] = [0, 0];
    for (const le of limits) {
      const count = upTo(le);
      if (count >= wanted && count > 0) {
        const high = bound(le) === Infinity ? low : bound(le);
        return low + (high - low) * (wanted - below) / (count - below);
      }
      [below, low] = [count, bound(le)];
    }
    return NaN;
  }
}

const bound = le => (le === "+Inf" ? Infinity : Number(le));
