// The dialog with the kept conversations: open one, delete one or all.

import { button, element, find } from "./dom.js";
import { deleteConversations, listConversations } from "./store.js";

const LIMITS = "Kept in this browser until you delete them: at most 100 conversations and 50 MB, the oldest go first.";

export class Conversations {
  // `open` and `onDelete` are called with ids.
  constructor(dialog, { open, onDelete }) {
    Object.assign(this, { dialog, open, onDelete });
    find("[data-action=close]", dialog).onclick = () => dialog.close();
    this.deleteAll = find("[data-action=delete-all]", dialog);
  }

  async show() {
    if (!this.dialog.open) this.dialog.showModal();
    const summaries = await listConversations().catch(() => null);
    const ids = summaries?.map(({ id }) => id) ?? [];
    find(".note", this.dialog).textContent = summaries ? LIMITS : "This browser does not let the page keep conversations.";
    find("ul", this.dialog).replaceChildren(...(summaries ?? []).map(summary => this.item(summary)));
    this.deleteAll.hidden = !ids.length;
    this.deleteAll.onclick = () => confirm(`Delete all ${ids.length} conversations?`) && this.delete(ids);
  }

  item({ id, title, at }) {
    const time = new Date(at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const open = () => {
      this.dialog.close();
      this.open(id);
    };
    return element("li", {},
      button([title, element("time", { class: "note" }, time)], open, { class: "quiet open" }),
      button("Delete", () => this.delete([id]), { "aria-label": `Delete ${title}` }));
  }

  async delete(ids) {
    await deleteConversations(ids);
    this.onDelete(ids);
    await this.show();
    find("button", this.dialog).focus();
  }
}
