// The chat page: the conversation, its requests, and the composer.
import { chat as ask } from "./api.js";
import { MessageView } from "./message.js";
import { Parameters } from "./parameters.js";
import { load, save } from "./store.js";

const $ = (id) => document.getElementById(id);

export class Chat {
  /** `failed` is told of every RequestError. */
  constructor(failed) {
    this.model = null;
    this._failed = failed;
    this._parameters = new Parameters();
    this._views = [];
    this._abort = null;
    for (const message of load("messages", [])) {
      if (message.state === "waiting" || message.state === "streaming") message.state = "stopped";
      this._add(message);
    }
    this._bind();
    this._refresh();
  }

  _bind() {
    const prompt = $("prompt");
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this._send();
    });
    prompt.addEventListener("input", () => this._refresh());
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this._send();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("new-button").addEventListener("click", () => this._clear());
    for (const idea of document.querySelectorAll(".ideas button")) {
      idea.addEventListener("click", () => {
        prompt.value = idea.textContent;
        this._send();
      });
    }
    document.addEventListener("keydown", (event) => {
      if (document.querySelector("dialog[open]")) return;
      if (event.key === "Escape") this.stop();
      const typing = /^(INPUT|TEXTAREA)$/.test(document.activeElement?.tagName);
      if (event.key === "/" && !typing && !$("view-chat").hidden) {
        event.preventDefault();
        prompt.focus();
      }
    });
    // Only while the end is in sight does new text scroll: who reads further up is left alone.
    $("scroller").addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = $("scroller");
      this._follows = scrollHeight - scrollTop - clientHeight < 60;
    });
  }

  stop() {
    this._abort?.abort();
  }

  _clear() {
    this.stop();
    this._views = [];
    $("messages").replaceChildren();
    this._save();
    this._refresh();
    $("prompt").focus();
  }

  _send() {
    const text = $("prompt").value.trim();
    if (!text || this._abort) return;
    if (!this._parameters.valid()) return;
    $("prompt").value = "";
    this._add({ role: "user", content: text });
    this._answer();
  }

  _retry() {
    if (this._abort) return;
    this._views.pop().remove();
    this._answer();
  }

  async _answer() {
    const abort = (this._abort = new AbortController());
    const body = { model: this.model ?? "pocketllm", messages: this._conversation(), ...this._parameters.values() };
    const view = this._add({ role: "assistant", content: "", state: "waiting" });
    this._save(); // a reload shows what was asked
    this._follows = true;
    this._refresh();
    const started = performance.now();
    try {
      for await (const event of ask(body, abort.signal)) {
        view.take(event, performance.now() - started);
        this._follow();
      }
      view.end("done", performance.now() - started);
    } catch (error) {
      if (abort.signal.aborted) {
        view.end("stopped", performance.now() - started);
      } else {
        view.fail(error);
        this._failed(error);
      }
    }
    this._abort = null;
    this._save();
    this._refresh();
    this._follow();
  }

  /** What the model is told: the system prompt and every message that has text. */
  _conversation() {
    const system = this._parameters.system;
    const said = this._views
      .map(({ message }) => ({ role: message.role, content: message.content }))
      .filter(({ content }) => content);
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  _add(message) {
    const view = new MessageView(message, () => this._retry());
    this._views.push(view);
    $("messages").append(view.node);
    return view;
  }

  _save() {
    save("messages", this._views.map(({ message }) => message));
  }

  _follow() {
    if (this._follows) $("scroller").scrollTop = $("scroller").scrollHeight;
  }

  _refresh() {
    const busy = this._abort !== null;
    const prompt = $("prompt");
    $("send").hidden = busy;
    $("send").disabled = !prompt.value.trim();
    $("stop").hidden = !busy;
    $("welcome").hidden = this._views.length > 0;
    $("messages").setAttribute("aria-busy", busy);
    this._views.forEach((view, index) => view.setLast(index === this._views.length - 1 && !busy));
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight, 200)}px`;
  }
}
