// Where the page begins: what is served, a tab for each of it, the server's state in words.
//
//   page.js → api.js (requests, the key) → chat.js, pipeline.js, embeddings.js, speech.js, live.js
//             answer.js (of a chat), exchange.js (a request and its answer, to look at), results.js,
//             files.js, dom.js

import { call, hasKey, forgetKey, whenKeyChanges } from "./api.js";
import { element, find } from "./dom.js";
import { startChat } from "./chat.js";
import { startPipeline } from "./pipeline.js";
import { startEmbeddings } from "./embeddings.js";
import { startSpeech } from "./speech.js";
import { startLive } from "./live.js";

const RETRY_MS = 1000; // while a model loads

// What decides over a section: `served` reads what /ready says.
const SECTIONS = [
  { id: "chat", served: ready => ready.chat_model, start: startChat },
  { id: "pipeline", served: ready => ready.task, start: startPipeline },
  { id: "embeddings", served: ready => ready.embedding_model, start: startEmbeddings },
  { id: "speech", served: ready => ready.transcription_model, start: startSpeech },
  { id: "live", served: () => true, start: startLive },
];

async function begin() {
  showKeyButton();
  whenKeyChanges(showKeyButton);
  const ready = await waitUntilReady();
  const models = await listModels(ready);
  for (const { id, served, start } of SECTIONS) {
    if (served(ready)) {
      addTab(id);
      start(find(`#${id}`), ready, models);
    }
  }
  openTab(wantedTab());
  window.addEventListener("hashchange", () => openTab(wantedTab()));
}

async function waitUntilReady() {
  for (;;) {
    try {
      const response = await fetch("ready");
      const answer = await response.json();
      if (response.ok) {
        const names = [answer.chat_model, answer.model, answer.embedding_model,
          answer.rerank_model, answer.transcription_model].filter(Boolean);
        showState("ready", [...new Set(names)].join(" · "));
        return answer;
      }
      showState("waiting", answer.error.message);
    } catch {
      showState("down", "the server does not answer");
    }
    await new Promise(resolve => setTimeout(resolve, RETRY_MS));
  }
}

// What /v1/models says, in its order. There is no such path where only a pipeline is served.
async function listModels(ready) {
  const named = ["chat", "embedding", "rerank", "transcription"];
  if (!named.some(name => ready[`${name}_model`])) return [];
  try {
    return (await (await call("v1/models")).json()).data;
  } catch (error) {
    showState("waiting", error.message);
    return [];
  }
}

function showState(state, words) {
  const shown = find("#state");
  shown.className = state;
  find(".words", shown).textContent = words;
}

function showKeyButton() {
  const button = find("#forget-key");
  button.hidden = !hasKey();
  button.onclick = forgetKey;
}

// ── tabs: one is in the order of focus, arrows lead to the others ──

function addTab(id) {
  const section = find(`#${id}`);
  const tab = element("button", {
    type: "button", role: "tab", id: `tab-${id}`, "aria-controls": id,
    onclick: () => openTab(id), onkeydown: moveAmongTabs,
  }, section.dataset.title);
  section.setAttribute("aria-labelledby", tab.id);
  find("nav").append(tab);
}

function wantedTab() {
  const id = location.hash.slice(1);
  return document.getElementById(`tab-${id}`) ? id : find("nav [role=tab]").id.slice(4);
}

function openTab(id) {
  for (const tab of document.querySelectorAll("nav [role=tab]")) {
    const chosen = tab.id === `tab-${id}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    find(`#${tab.getAttribute("aria-controls")}`).hidden = !chosen;
  }
  if (wantedTab() !== id) history.replaceState(null, "", `#${id}`);
  find(`#${id}`).dispatchEvent(new Event("shown"));
}

function moveAmongTabs(event) {
  const tabs = [...document.querySelectorAll("nav [role=tab]")];
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
  next.focus();
  next.click();
}

begin();
