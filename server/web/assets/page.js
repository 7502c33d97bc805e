// The page's entry point: a tab for each served model, and the server's state.
//
//   page.js → chat.js → composer.js, message.js → markdown.js, speak.js, conversations.js → store.js
//           → pipeline.js → results.js, speak.js, texts.js, speech.js, live.js
//   all of them use api.js (requests, the key), exchange.js (inspect a request), files.js and dom.js

import { call, showForgetKey } from "./api.js";
import { element, find } from "./dom.js";
import { startChat } from "./chat.js";
import { startPipeline } from "./pipeline.js";
import { chooseSpeaker } from "./speak.js";
import { startSpeech } from "./speech.js";
import { startEmbeddings, startRerank } from "./texts.js";
import { startLive } from "./live.js";

const RETRY_MS = 1000; // while a model loads

// A section is shown if the response of /ready has its model: `ready` is the name of that field. It gets the
// models of /models that serve `serves`.
const SECTIONS = [
  { id: "chat", ready: "chat_model", serves: "generation", start: startChat },
  { id: "pipeline", ready: "task", serves: "pipeline", start: startPipeline },
  { id: "embeddings", ready: "embedding_model", serves: "embedding", start: startEmbeddings },
  { id: "rerank", ready: "rerank_model", serves: "rerank", start: startRerank },
  { id: "speech", ready: "transcription_model", serves: "transcription", start: startSpeech },
  { id: "live", ready: "status", start: startLive },
];

// Starts the sections once the models are ready. Then shows what is built or compiled, which makes the
// models faster, until that is done.
async function start() {
  showForgetKey();
  for (let models = null; ;) {
    try {
      const response = await fetch("ready");
      const ready = await response.json();
      if (response.ok) {
        models ??= await startSections(ready);
        showReady(ready, models);
        if (!ready.stages) return watchLoads(ready, models);
      } else {
        showState("waiting", ready.error.message);
      }
    } catch {
      showState("down", "the server does not respond");
    }
    await new Promise(resolve => setTimeout(resolve, RETRY_MS));
  }
}

async function startSections(ready) {
  const served = SECTIONS.filter(section => ready[section.ready]);
  const models = await listModels();
  chooseSpeaker(models);
  for (const { id, serves, start } of served) {
    addTab(id);
    start(find(`#${id}`), ready, models.filter(model => model.serves === serves));
  }
  openTab(tabFromAddress());
  window.addEventListener("hashchange", () => openTab(tabFromAddress()));
  return models;
}

// While a request runs, shows the load of a model that it may wait for.
function watchLoads(ready, models) {
  if (models.every(({ status }) => status.value === "loaded")) return;
  setInterval(async () => {
    if (!find("[data-running]") && find("#state").className === "ready") return;
    const { id, status } = (await listModels()).find(model => model.status.value === "loading") ?? {};
    if (!status) return showReady(ready, models);
    const { stage = "", progress } = status;
    const share = progress ? `, ${Math.round(100 * progress.current / progress.total)} %` : "";
    showState("waiting", `${id} is loading${stage && ` (stage ${stage}${share})`}`);
  }, RETRY_MS);
}

async function listModels() {
  try {
    const { data } = await (await call("models")).json();
    return data.filter(({ id, root }) => id === root); // without aliases
  } catch (error) {
    showState("waiting", error.message);
    return [];
  }
}

function showReady({ stages = {} }, models) {
  showState("ready", [...models.map(({ id }) => id), ...new Set(Object.values(stages))].join(" · "));
}

function showState(state, text) {
  find("#state").className = state;
  find("#state .text").textContent = find("#state").title = text;
}

// ── tabs: the selected one is in the tab order, arrow keys reach the others ──

function addTab(id) {
  const section = find(`#${id}`);
  const tab = element("button", {
    type: "button", role: "tab", id: `tab-${id}`, "aria-controls": id,
    onclick: () => openTab(id), onkeydown: onTabKey,
  }, section.dataset.title);
  section.setAttribute("aria-labelledby", tab.id);
  find("nav").append(tab);
}

function tabFromAddress() {
  const id = location.hash.slice(1);
  return document.getElementById(`tab-${id}`) ? id : find("nav [role=tab]").id.slice(4);
}

function openTab(id) {
  for (const tab of document.querySelectorAll("nav [role=tab]")) {
    const selected = tab.id === `tab-${id}`;
    tab.setAttribute("aria-selected", selected);
    tab.tabIndex = selected ? 0 : -1;
    find(`#${tab.getAttribute("aria-controls")}`).hidden = !selected;
  }
  if (tabFromAddress() !== id) history.replaceState(null, "", `#${id}`);
  find(`#${id}`).dispatchEvent(new Event("shown"));
}

function onTabKey({ key, target }) {
  const { firstChild, lastChild } = find("nav");
  const next = { ArrowRight: target.nextSibling ?? firstChild, ArrowLeft: target.previousSibling ?? lastChild }[key];
  next?.focus();
  next?.click();
}

start();
