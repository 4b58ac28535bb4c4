// Up to five minutes of history, in charts drawn by uPlot.
const LONGEST = 300;
const SHORTEST = 60;
const HEIGHT = 170;
const STEPS = [1, 2, 5];

const CHARTS = [
  { title: "Tokens per second", series: [["generated", "generated"], ["prompt", "prompt"]] },
  { title: "Requests", series: [["running", "running"], ["waiting", "waiting"]] },
  { title: "Time to first token, ms", series: [["first50", "p50"], ["first95", "p95"]], points: true },
  { title: "Inter-token latency, ms", series: [["between50", "p50"], ["between95", "p95"]] },
];
const NAMES = CHARTS.flatMap(({ series }) => series.map(([name]) => name));

export class Charts {
  constructor(place) {
    this._times = [];
    this._values = Object.fromEntries(NAMES.map((name) => [name, []]));
    this._boxes = CHARTS.map((chart) => makeBox(chart, place));
    this.restyle();
  }

  /** A point of `rates.js`, now. */
  add(point) {
    this._times.push(Date.now() / 1000);
    for (const [name, values] of Object.entries(this._values)) values.push(point[name] ?? null);
    if (this._times.length > LONGEST) {
      this._times.shift();
      for (const values of Object.values(this._values)) values.shift();
    }
    for (const box of this._boxes) {
      box.drawn.setData(this._data(box.chart));
      this._label(box, box.drawn.cursor.idx);
    }
  }

  /** Draw anew, in the colours and the width of now. */
  restyle() {
    for (const box of this._boxes) {
      box.drawn?.destroy();
      box.drawn = new uPlot(this._options(box), this._data(box.chart), box.plot);
    }
  }

  _data({ series }) {
    return [this._times, ...series.map(([name]) => this._values[name])];
  }

  /** The values under the pointer, or the newest ones. */
  _label({ chart, keys }, index) {
    chart.series.forEach(([name, label], number) => {
      const value = this._values[name].at(index ?? -1);
      keys[number].textContent = typeof value === "number" ? `${label} ${short(value)}` : label;
    });
  }

  /** The end of the time axis and its length: no shorter than a minute, no longer than five. */
  _span() {
    const last = this._times.at(-1) ?? Date.now() / 1000;
    const length = last - (this._times[0] ?? last);
    return [last, Math.min(LONGEST, Math.max(SHORTEST, length))];
  }

  _options(box) {
    const style = getComputedStyle(box.plot);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {
      stroke: colour("--text-soft"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
    };
    const range = () => {
      const [last, length] = this._span();
      return [last - length, last];
    };
    const splits = () => {
      const [last, length] = this._span();
      const step = length <= 90 ? 15 : length <= 180 ? 30 : 60;
      return Array.from({ length: Math.floor(length / step) + 1 }, (_, i) => last - i * step).reverse();
    };
    const decades = Array.from({ length: 7 }, (_, power) => STEPS.map((step) => step * 10 ** power)).flat();
    return {
      width: box.plot.clientWidth || 300,
      height: HEIGHT,
      padding: [8, 20, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      hooks: { setCursor: [(drawn) => this._label(box, drawn.cursor.idx)] },
      scales: { x: { range }, y: { range: (_, __, high) => [0, Math.max(1, (high ?? 1) * 1.15)] } },
      axes: [
        { ...axis, size: 26, splits, values: (_, times) => times.map((time) => ago(this._span()[0] - time)) },
        { ...axis, size: 46, space: 30, incrs: decades, values: (_, values) => values.map(short) },
      ],
      series: [
        {},
        ...box.chart.series.map((_, index) => ({
          stroke: colour(`--series-${index}`),
          fill: index === 0 && !box.chart.points ? colour("--series-fill") : undefined,
          width: 2,
          points: { show: Boolean(box.chart.points), size: 6, fill: colour(`--series-${index}`) },
        })),
      ],
    };
  }
}

function makeBox(chart, place) {
  const element = (tag, name) => Object.assign(document.createElement(tag), { className: name });
  const [box, head, title] = [element("section", "card"), element("header", ""), element("h2", "")];
  const [legend, plot] = [element("p", "legend"), element("div", "plot")];
  const keys = chart.series.map((_, index) => element("span", `key series-${index}`));
  title.textContent = chart.title;
  legend.append(...keys);
  head.append(title, legend);
  box.append(head, plot);
  place.append(box);
  return { chart, plot, keys, drawn: null };
}

const short = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });

function ago(seconds) {
  const rest = Math.round(seconds);
  if (rest === 0) return "now";
  return rest < 60 ? `−${rest} s` : `−${Math.floor(rest / 60)}:${String(rest % 60).padStart(2, "0")}`;
}
