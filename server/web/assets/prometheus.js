// Parse the text of /metrics; look up values by name and labels.

const LINE = /^onequeue_(\w+?)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export function parse(text, at) {
  const series = new Map(); // by name: [{labels, value}]
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match) continue;
    const [, name, labels = "", value] = match;
    const pairs = [...labels.matchAll(LABEL)].map(([, key, text]) => [key, text]);
    if (!series.has(name)) series.set(name, []);
    series.get(name).push({ labels: Object.fromEntries(pairs), value: Number(value) });
  }
  return new Sample(series, at);
}

const any = () => true;

// The metrics at one time, `at` seconds.
class Sample {
  constructor(series, at) {
    this.series = series;
    this.at = at;
  }

  has(name) {
    return this.series.has(name);
  }

  labels(name, matches = any) {
    return (this.series.get(name) ?? []).map(({ labels }) => labels).filter(matches);
  }

  sum(name, matches = any) {
    const values = (this.series.get(name) ?? []).filter(({ labels }) => matches(labels));
    return values.reduce((total, { value }) => total + value, 0);
  }

  // Returns the increase of a counter since an earlier sample, or since the server's start.
  since(then, name, matches = any) {
    return this.sum(name, matches) - (then?.sum(name, matches) ?? 0);
  }

  mean(histogram, then = null) {
    return this.since(then, `${histogram}_sum`) / this.since(then, `${histogram}_count`);
  }

  // Interpolates within the percentile's bucket; NaN without observations.
  percentile(histogram, share, then = null, matches = any) {
    const name = `${histogram}_bucket`;
    const limits = [...new Set(this.labels(name, matches).map(({ le }) => le))].sort((a, b) => bound(a) - bound(b));
    const upTo = le => this.since(then, name, labels => labels.le === le && matches(labels));
    const rank = share * (limits.length ? upTo(limits.at(-1)) : 0);
    let [below, low] = [0, 0];
    for (const le of limits) {
      const count = upTo(le);
      if (count >= rank && count > 0) {
        const high = bound(le) === Infinity ? low : bound(le);
        return low + (high - low) * (rank - below) / (count - below);
      }
      [below, low] = [count, bound(le)];
    }
    return NaN;
  }
}

const bound = le => (le === "+Inf" ? Infinity : Number(le));
