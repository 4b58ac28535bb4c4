// Text of a model to DOM nodes. Nothing a model writes may run, load or leave this page:
// raw HTML is shown as text, and what Markdown makes of the rest passes an allow-list. The page's
// content security policy would stop what slips through both.
import { Marked } from "../vendor/marked.js";

const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escaped = (text) => text.replace(/[&<>"]/g, (letter) => ENTITIES[letter]);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    // An image would tell its server that it was looked at, and carry whatever is in its address.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  },
});

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a p br hr em strong del code pre blockquote ul ol li".split(" "),
    ..."h1 h2 h3 h4 h5 h6 table thead tbody tr th td".split(" "),
  ],
  ALLOWED_ATTR: ["href", "title", "align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** A fragment to put into the page. */
export function render(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) wrap(table, "table-box");
  for (const block of fragment.querySelectorAll("pre")) {
    wrap(block, "code-box").append(copyButton(block.textContent));
  }
  return fragment;
}

function wrap(node, name) {
  const box = document.createElement("div");
  box.className = name;
  node.replaceWith(box);
  box.append(node);
  return box;
}

export function copyButton(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy by hand";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}
