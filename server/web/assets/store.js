// What the browser keeps: conversations in IndexedDB, bounded in number and bytes, and a few strings for
// as long as the tab is open. Where the browser forbids either, the page works without.

const MAX_CONVERSATIONS = 100;
const MAX_BYTES = 50e6; // of all of them

// Strings of this tab, by name.
export const session = tabStorage();

function tabStorage() {
  try {
    return sessionStorage;
  } catch {
    return {};
  }
}

// ── conversations: {id, title, messages, settings}; a summary is {id, title, at, bytes} ──

const STORES = ["summaries", "conversations"];
let database = null;

function open() {
  return database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("onequeue", 1);
    request.onupgradeneeded = () => STORES.forEach(name => request.result.createObjectStore(name, { keyPath: "id" }));
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      request.result.onclose = () => { database = null; };
      resolve(request.result);
    };
  });
}

// Calls `work` with the object stores; resolves to the result of the request that it returns.
async function transact(mode, work) {
  const transaction = (await open()).transaction(STORES, mode);
  return new Promise((resolve, reject) => {
    transaction.onabort = () => reject(transaction.error);
    const request = work(...STORES.map(name => transaction.objectStore(name)));
    transaction.oncomplete = () => resolve(request?.result);
  });
}

// Returns the summaries, newest first.
export async function listConversations() {
  return newestFirst(await transact("readonly", summaries => summaries.getAll()));
}

export async function loadConversation(id) {
  const record = await transact("readonly", (_, conversations) => conversations.get(id));
  return record && JSON.parse(record.text);
}

export function deleteConversations(ids) {
  return transact("readwrite", (...stores) => ids.forEach(id => stores.forEach(store => store.delete(id))));
}

// Keeps a conversation, and deletes the oldest ones beyond the bounds. Returns whether it was kept.
export async function saveConversation(conversation) {
  const { id, title } = conversation;
  const text = JSON.stringify(conversation);
  const summary = { id, title, at: Date.now(), bytes: new Blob([text]).size };
  const isTooLarge = summary.bytes > MAX_BYTES;
  await transact("readwrite", (summaries, conversations) => {
    if (isTooLarge) return;
    conversations.put({ id, text });
    summaries.put(summary);
    const request = summaries.getAll();
    request.onsuccess = () => surplus(request.result).forEach(old => [summaries, conversations].forEach(store => store.delete(old.id)));
  });
  return !isTooLarge;
}

const newestFirst = summaries => summaries.sort((one, other) => other.at - one.at);

// Returns the summaries beyond the bounds, the oldest ones.
export function surplus(summaries, maxCount = MAX_CONVERSATIONS, maxBytes = MAX_BYTES) {
  let total = 0;
  return newestFirst(summaries).filter(({ bytes }, n) => (total += bytes) > maxBytes || n >= maxCount);
}
