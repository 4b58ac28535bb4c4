// Whether the gateway and the model behind it answer. Asks once at the start, and after a failure until
// they do, with growing pauses; otherwise requests themselves tell.
const LONGEST_PAUSE = 15_000;
const FIRST_PAUSE = 1000;

const NAMES = { online: "Ready", starting: "Model not ready", offline: "Offline", unknown: "Connecting" };

export class Connection {
  constructor() {
    this.state = "unknown";
    this.onOnline = () => {};
    this._pause = FIRST_PAUSE;
    this._timer = null;
    this._checking = false;
    document.getElementById("banner-retry").addEventListener("click", () => {
      this._pause = FIRST_PAUSE;
      this.check();
    });
    addEventListener("online", () => this.check());
  }

  /** A request could not reach the gateway. */
  lost() {
    if (this.state === "offline") return;
    this._show("offline");
    this._again();
  }

  async check() {
    if (this._checking) return;
    this._checking = true;
    clearTimeout(this._timer);
    let state = "offline";
    try {
      const response = await fetch("ready", { cache: "no-store", signal: AbortSignal.timeout(12_000) });
      state = response.ok ? "online" : "starting";
    } catch {
      // Offline is what it is.
    }
    this._checking = false;
    const back = state === "online" && this.state !== "online";
    this._show(state);
    if (state !== "online") this._again();
    else this._pause = FIRST_PAUSE;
    if (back) this.onOnline();
  }

  _again() {
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this.check(), this._pause);
    this._pause = Math.min(this._pause * 2, LONGEST_PAUSE);
  }

  _show(state) {
    this.state = state;
    const status = document.getElementById("status");
    status.dataset.state = state;
    status.lastElementChild.textContent = NAMES[state];
    const banner = document.getElementById("banner");
    banner.hidden = state === "online" || state === "unknown";
    const [title, text] =
      state === "offline"
        ? ["The gateway cannot be reached.", "Check that it runs; this page tries again by itself."]
        : ["The model server does not answer yet.", "It may be loading its model; this page tries again by itself."];
    document.getElementById("banner-title").textContent = title;
    document.getElementById("banner-text").textContent = text;
  }
}
