// The page's entry point: a tab for each served model, and the server's state.
//
//   page.js → chat.js → composer.js, message.js → markdown.js, conversations.js → store.js
//           → pipeline.js → results.js, embeddings.js, rerank.js, speech.js, live.js
//   all of them use api.js (requests, the key), exchange.js (inspect a request), files.js and dom.js

import { call, hasKey, forgetKey, whenKeyChanges } from "./api.js";
import { element, find } from "./dom.js";
import { startChat } from "./chat.js";
import { startPipeline } from "./pipeline.js";
import { startEmbeddings } from "./embeddings.js";
import { startRerank } from "./rerank.js";
import { startSpeech } from "./speech.js";
import { startLive } from "./live.js";

const RETRY_MS = 1000; // while a model loads

// `served` returns whether a section is shown, by the response of /ready.
const SECTIONS = [
  { id: "chat", served: ready => ready.chat_model, start: startChat },
  { id: "pipeline", served: ready => ready.task, start: startPipeline },
  { id: "embeddings", served: ready => ready.embedding_model, start: startEmbeddings },
  { id: "rerank", served: ready => ready.rerank_model, start: startRerank },
  { id: "speech", served: ready => ready.transcription_model, start: startSpeech },
  { id: "live", served: () => true, start: startLive },
];

async function start() {
  showKeyButton();
  whenKeyChanges(showKeyButton);
  const ready = await waitUntilReady();
  const models = await listModels(ready);
  for (const { id, served, start: startSection } of SECTIONS) {
    if (served(ready)) {
      addTab(id);
      startSection(find(`#${id}`), ready, models);
    }
  }
  openTab(tabFromAddress());
  window.addEventListener("hashchange", () => openTab(tabFromAddress()));
}

async function waitUntilReady() {
  for (;;) {
    try {
      const response = await fetch("ready");
      const document = await response.json();
      if (response.ok) {
        const names = [document.chat_model, document.model, document.embedding_model,
          document.rerank_model, document.transcription_model].filter(Boolean);
        showReady([...new Set(names)].join(" · "), document);
        return document;
      }
      showState("waiting", document.error.message);
    } catch {
      showState("down", "the server does not respond");
    }
    await new Promise(resolve => setTimeout(resolve, RETRY_MS));
  }
}

// Returns the list of /v1/models, a path that a server without named models lacks.
async function listModels(ready) {
  const named = ["chat", "embedding", "rerank", "transcription"];
  if (!named.some(name => ready[`${name}_model`])) return [];
  try {
    const { data } = await (await call("v1/models")).json();
    return data.filter(({ id, root }) => id === root); // without aliases
  } catch (error) {
    showState("waiting", error.message);
    return [];
  }
}

// Shows what is built or compiled, which makes the models faster, until that is done.
async function showReady(names, { stages }) {
  showState("ready", [names, ...new Set(Object.values(stages ?? {}))].join(" · "));
  if (!stages) return;
  await new Promise(resolve => setTimeout(resolve, RETRY_MS));
  try {
    showReady(names, await (await fetch("ready")).json());
  } catch {
    showState("ready", names);
  }
}

function showState(state, text) {
  const status = find("#state");
  status.className = state;
  find(".text", status).textContent = text;
}

function showKeyButton() {
  const button = find("#forget-key");
  button.hidden = !hasKey();
  button.onclick = forgetKey;
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

function onTabKey(event) {
  const tabs = [...document.querySelectorAll("nav [role=tab]")];
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
  next.focus();
  next.click();
}

start();
