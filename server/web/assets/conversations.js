// The dialog with the kept conversations: open one, delete one or all.

import { button, element, find } from "./dom.js";
import { deleteConversations, listConversations } from "./store.js";

const LIMITS = "Kept in this browser until you delete them: at most 100 conversations and 50 MB, the oldest go first.";

// Calls `open` with the id of a conversation, and `onDelete` with the ids of deleted ones.
export async function showConversations(open, onDelete) {
  const dialog = find("#conversations");
  const deleteAll = find("[data-action=delete-all]", dialog);
  const remove = async ids => {
    await deleteConversations(ids);
    onDelete(ids);
    await showConversations(open, onDelete);
    find("button", dialog).focus();
  };
  if (!dialog.open) dialog.showModal();
  const summaries = await listConversations().catch(() => null);
  find(".note", dialog).textContent = summaries ? LIMITS : "This browser does not let the page keep conversations.";
  find("ul", dialog).replaceChildren(...(summaries ?? []).map(({ id, title, at }) => {
    const time = new Date(at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    return element("li", {},
      button([title, element("time", { class: "note" }, time)], () => {
        dialog.close();
        open(id);
      }, { class: "quiet open" }),
      button("Delete", () => remove([id]), { "aria-label": `Delete ${title}` }));
  }));
  const ids = summaries?.map(({ id }) => id) ?? [];
  deleteAll.hidden = !ids.length;
  deleteAll.onclick = () => confirm(`Delete all ${ids.length} conversations?`) && remove(ids);
}
