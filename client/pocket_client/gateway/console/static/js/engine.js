// The live engine view: asks the gateway once a second while it is looked at.
import { getJson } from "./api.js";
import { Charts } from "./charts.js";
import { drawBlocks } from "./kvmap.js";
import { hitRate, pointOf, spread } from "./rates.js";

const PERIOD = 1000;
const $ = (id) => document.getElementById(id);

const TILES = [
  ["running", "Running"],
  ["waiting", "Waiting"],
  ["generated", "Tokens/s"],
  ["first", "First token"],
  ["between", "Between tokens"],
  ["hits", "Prefix cache hits"],
];

const whole = (value) => (value === null ? "–" : Math.round(value).toLocaleString("en"));
const ms = (value) => {
  if (value === null || value === undefined) return "–";
  return value < 10 ? `${value.toFixed(1)} ms` : value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
};

export class EngineView {
  constructor(failed) {
    this._failed = failed;
    this._before = null;
    this._timer = null;
    this._watching = false;
    this._kept = {};
    this._charts = null;
    for (const [name, label] of TILES) {
      const box = document.createElement("div");
      const term = document.createElement("dt");
      const value = document.createElement("dd");
      const hint = document.createElement("dd");
      term.textContent = label;
      value.id = `tile-${name}`;
      value.textContent = "–";
      hint.id = `hint-${name}`;
      hint.className = "hint";
      box.append(term, value, hint);
      $("tiles").append(box);
    }
    const redraw = () => {
      if (!this._before?.engine || $("view-engine").hidden) return;
      this._charts?.restyle();
      drawBlocks($("kv-map"), $("kv-legend"), this._before.engine);
    };
    addEventListener("themechange", redraw);
    addEventListener("resize", redraw);
  }

  start() {
    if (this._watching) return;
    this._watching = true;
    this._charts ??= new Charts($("charts"));
    this._poll();
  }

  stop() {
    this._watching = false;
    clearTimeout(this._timer);
  }

  async _poll() {
    let pause = PERIOD;
    try {
      this._take(await getJson("console/metrics"));
    } catch (error) {
      pause = 3 * PERIOD;
      this._note(`${error.message} ${error.remedy ?? ""}`);
      this._failed(error);
    }
    if (this._watching) this._timer = setTimeout(() => this._poll(), pause);
  }

  _take(sample) {
    if (sample.time === this._before?.time) return;
    const point = pointOf(this._before, sample);
    this._before = sample;
    this._charts.add(point);
    if (!sample.engine) {
      this._note("The model server does not answer. Its figures come back with it.");
      return;
    }
    const away = sample.servers.filter((server) => !server.healthy).length;
    this._note(away ? `${away} of ${sample.servers.length} model servers do not answer; these are the others' figures.` : "");
    this._tiles(sample, point);
    drawBlocks($("kv-map"), $("kv-legend"), sample.engine);
  }

  _tiles({ engine, gateway, latencies, servers }, point) {
    // Between requests the last known latencies stay; before the first one, those of all time.
    const ever = { ...spread("first", null, latencies.first_token), ...spread("between", null, latencies.inter_token) };
    for (const name of Object.keys(ever)) this._kept[name] = point[name] ?? this._kept[name] ?? ever[name];
    const hits = hitRate(engine);
    const show = (name, text, hint) => {
      $(`tile-${name}`).textContent = text;
      $(`hint-${name}`).textContent = hint;
    };
    show("running", whole(engine.running), `of ${engine.slots_total} slots${servers.length > 1 ? `, ${servers.length} servers` : ""}`);
    show("waiting", whole(engine.waiting + gateway.waiting), gateway.waiting ? `${gateway.waiting} in the gateway` : "");
    show("generated", whole(point.generated), `${whole(engine.generated_tokens)} in all`);
    show("first", ms(this._kept.first50), `p50; p95 ${ms(this._kept.first95)}`);
    show("between", ms(this._kept.between50), `p50; p95 ${ms(this._kept.between95)}`);
    show("hits", hits === null ? "–" : `${hits.toFixed(0)} %`, `of ${whole(engine.prefix_query_tokens)} prompt tokens`);
  }

  _note(text) {
    $("engine-note").hidden = !text;
    $("engine-note").textContent = text;
  }
}
