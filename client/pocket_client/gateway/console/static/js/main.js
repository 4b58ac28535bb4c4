// Puts the page together: views, colours, the key, and what the parts tell each other.
import { apiKey, getJson } from "./api.js";
import { Chat } from "./chat.js";
import { Connection } from "./connection.js";
import { EngineView } from "./engine.js";

const $ = (id) => document.getElementById(id);
const connection = new Connection();
const chat = new Chat(failed);
const engine = new EngineView(failed);

/** Any request failed: say so where all views can see it. */
function failed(error) {
  if (error.status === 0) connection.lost();
  if (error.status === 401) askForKey(error.message);
}

// --- views ---------------------------------------------------------------------------------------

const VIEWS = ["chat", "engine"];

function showView(name) {
  for (const view of VIEWS) {
    const shown = view === name;
    $(`view-${view}`).hidden = !shown;
    $(`tab-${view}`).setAttribute("aria-selected", shown);
    $(`tab-${view}`).tabIndex = shown ? 0 : -1;
  }
  if (name === "engine") engine.start();
  else engine.stop();
  history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`);
}

for (const view of VIEWS) {
  const tab = $(`tab-${view}`);
  tab.addEventListener("click", () => showView(view));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = VIEWS[1 - VIEWS.indexOf(view)];
    showView(other);
    $(`tab-${other}`).focus();
  });
}

// --- colours -------------------------------------------------------------------------------------

const THEMES = { system: "as the system", light: "light", dark: "dark" };

function nameTheme() {
  const label = `Colours: ${THEMES[pocketTheme.chosen]}`;
  $("theme-button").setAttribute("aria-label", label);
  $("theme-button").title = label;
}
$("theme-button").addEventListener("click", () => {
  pocketTheme.next();
  nameTheme();
});
nameTheme();

// --- key -----------------------------------------------------------------------------------------

const keyText = $("key-reason").textContent;

function askForKey(reason = keyText) {
  if ($("key-dialog").open) return;
  $("key-reason").textContent = reason;
  $("key-input").value = apiKey.value;
  $("key-dialog").returnValue = "";
  $("key-dialog").showModal();
}
$("key-button").addEventListener("click", () => askForKey());
$("key-input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  $("key-dialog").close("save");
});
$("key-dialog").addEventListener("close", () => {
  const said = $("key-dialog").returnValue;
  if (said === "save") apiKey.value = $("key-input").value.trim();
  if (said === "forget") apiKey.value = "";
  $("key-input").value = "";
  if (said === "save") learnModel();
});

// --- start ---------------------------------------------------------------------------------------

async function learnModel() {
  try {
    const { data } = await getJson("v1/models");
    chat.model = data[0].id;
    $("model").textContent = chat.model;
  } catch (error) {
    failed(error);
  }
}

connection.onOnline = () => {
  if (chat.model === null) learnModel();
};
document.addEventListener("visibilitychange", () => {
  if (document.hidden) engine.stop();
  else if (!$("view-engine").hidden) engine.start();
});
showView(location.hash === "#engine" ? "engine" : "chat");
learnModel();
connection.check();
