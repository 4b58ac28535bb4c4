// One message: its text as it grows, its figures, its error.
import { copyButton, render } from "./markdown.js";

const LONG = 4000;
const LONG_PAUSE = 150;
const ENDINGS = { length: "cut at the longest answer", stop: "" };

function element(tag, name, text = "") {
  const node = document.createElement(tag);
  node.className = name;
  node.textContent = text;
  return node;
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

export class MessageView {
  /** `message` {role, content, state, figures, error} is what is stored; `retry` asks again. */
  constructor(message, retry) {
    this.message = message;
    this.node = element("li", `message ${message.role}`);
    this._text = element("div", "text");
    this._error = element("div", "error");
    this._foot = element("div", "foot");
    this._figures = element("span", "figures");
    this._retry = element("button", "quiet", "Try again");
    this._retry.addEventListener("click", retry);
    this._pending = 0;
    this._last = false;
    this.node.append(element("span", "sr-only", message.role === "user" ? "You:" : "Model:"), this._text);
    if (message.role === "assistant") {
      this._error.setAttribute("role", "alert");
      this._foot.append(this._figures, element("span", "grow"), this._retry);
      this.node.append(this._error, this._foot);
    }
    this._show();
  }

  remove() {
    clearTimeout(this._pending);
    this.node.remove();
  }

  /** One event of the stream, `ms` after the request. */
  take(event, ms) {
    const choice = event.choices[0];
    const delta = choice?.delta.content;
    if (delta) {
      this.message.figures ??= { first: ms };
      this.message.content += delta;
      this.message.state = "streaming";
      this._later();
    }
    if (choice?.finish_reason) this.message.finish = choice.finish_reason;
    if (event.usage) this.message.usage = event.usage;
  }

  end(state, ms) {
    this.message.state = state;
    this.message.figures = { first: ms, ...this.message.figures, total: ms };
    this._show();
  }

  fail({ message, remedy }) {
    this.message.state = "failed";
    this.message.error = { message, remedy };
    this._show();
  }

  setLast(last) {
    this._last = last;
    this._retry.hidden = !last;
  }

  /** Drawing a long text costs more than its next token: it is drawn a few times a second. */
  _later() {
    if (this._pending) return;
    const pause = this.message.content.length > LONG ? LONG_PAUSE : 16;
    this._pending = setTimeout(() => this._show(), pause);
  }

  _show() {
    clearTimeout(this._pending);
    this._pending = 0;
    const { role, content, state, error } = this.message;
    this.node.dataset.state = state ?? "done";
    if (role === "user") {
      this._text.textContent = content;
      return;
    }
    this._text.replaceChildren(render(content));
    this._error.hidden = !error;
    if (error) {
      this._error.replaceChildren(element("strong", "", error.message), element("p", "", error.remedy));
    }
    this._foot.hidden = state === "streaming" || state === "waiting";
    if (this._foot.hidden) return;
    this._figures.textContent = this._figureText();
    this._foot.querySelector(".copy")?.remove();
    if (content) this._retry.before(copyButton(content));
  }

  _figureText() {
    const { usage, figures, state, finish } = this.message;
    const parts = [];
    if (state === "stopped") parts.push("stopped");
    if (usage) {
      const answered = usage.completion_tokens;
      const streamed = figures.total - figures.first;
      parts.push(`${answered} tokens`);
      if (answered > 1 && streamed > 1) parts.push(`${(((answered - 1) * 1000) / streamed).toFixed(1)} per second`);
    }
    if (figures?.first && this.message.content) parts.push(`first after ${seconds(figures.first)}`);
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens;
      parts.push(`prompt ${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`);
    }
    if (ENDINGS[finish]) parts.push(ENDINGS[finish]);
    return parts.join(" · ");
  }
}
