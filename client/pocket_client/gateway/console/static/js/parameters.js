// The settings of the chat page. An empty field is not sent: the server's default holds.
import { load, save } from "./store.js";

const INTEGERS = ["top_k", "seed", "max_tokens"];
const NUMBERS = ["temperature", "top_p", ...INTEGERS];

export class Parameters {
  constructor() {
    this._form = document.getElementById("parameters");
    const panel = document.getElementById("settings");
    const button = document.getElementById("settings-button");
    for (const [name, value] of Object.entries(load("parameters", {}))) {
      if (this._form.elements[name]) this._form.elements[name].value = value;
    }
    this._form.addEventListener("input", () => this._save());
    this._form.addEventListener("reset", () => setTimeout(() => this._save()));
    this._form.addEventListener("submit", (event) => event.preventDefault());
    button.addEventListener("click", () => {
      const open = panel.classList.toggle("open");
      button.setAttribute("aria-expanded", open);
      if (open) this._form.elements.system.focus();
    });
    this._open = () => {
      panel.classList.add("open");
      button.setAttribute("aria-expanded", true);
    };
  }

  get system() {
    return this._form.elements.system.value.trim();
  }

  /** Whether all are in range; if not, the browser shows which is not. */
  valid() {
    if (!this._form.checkValidity()) this._open();
    return this._form.reportValidity();
  }

  values() {
    const values = {};
    for (const name of NUMBERS) {
      const text = this._form.elements[name].value;
      if (text !== "") values[name] = Number(text);
    }
    return values;
  }

  _save() {
    save("parameters", Object.fromEntries(new FormData(this._form)));
  }
}
