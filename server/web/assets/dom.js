// Create and find elements. Text is always text: nothing here parses markup.

const MAX_ANNOUNCED = 20;
const SVG_TAGS = ["svg", "g", "path", "rect", "text"];

export function find(selector, within = document) {
  return within.querySelector(selector);
}

// element("p", {class: "note", onclick: f}, "text", otherElement, [more]): null children are left out.
export function element(tag, properties = {}, ...children) {
  const isSvg = SVG_TAGS.includes(tag);
  const node = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (name.startsWith("on")) node[name] = value;
    else if (typeof value === "boolean") node.toggleAttribute(name, value);
    else node.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child !== null) node.append(child);
  return node;
}

// Announces a text to screen readers, behind those before it.
export function announce(text) {
  const announcer = find("#announcer");
  announcer.append(element("p", {}, text));
  if (announcer.children.length > MAX_ANNOUNCED) announcer.firstChild.remove();
}

// Returns a text with the seconds that it has been shown.
export function stopwatch(text) {
  const node = element("p", { class: "note running" }, `${text}…`);
  const started = performance.now();
  const timer = setInterval(() => {
    if (!node.isConnected) clearInterval(timer);
    else node.textContent = `${text}… ${Math.round((performance.now() - started) / 1000)} s`;
  }, 1000);
  return node;
}

// Shows on a section's tab that something runs.
export function markRunning(section, running) {
  find(`#tab-${section.id}`).toggleAttribute("data-running", running);
}

// Runs `work` when the form of a section is submitted; shows the elements that it returns, or its error, below.
export function showOnSubmit(section, work) {
  const submit = find("[data-action=send]", section);
  const output = element("div", { class: "output", "aria-live": "polite" });
  section.append(output);
  find("form", section).onsubmit = async event => {
    event.preventDefault();
    submit.disabled = true;
    output.replaceChildren(stopwatch("Running"));
    markRunning(section, true);
    try {
      output.replaceChildren(...await work());
    } catch (error) {
      output.replaceChildren(failure(error));
    } finally {
      submit.disabled = false;
      markRunning(section, false);
    }
  };
}

// Puts a select into the toolbar of a section that several models serve. Returns a function that returns
// the chosen one; `onchange` gets it.
export function chooseModel(section, models, onchange = () => {}, chosen = 0) {
  const select = element("select", { "aria-label": "Model" }, models.map(({ id }) => element("option", {}, id)));
  select.selectedIndex = chosen;
  select.onchange = () => onchange(select.selectedIndex);
  if (models.length > 1) find(".toolbar", section).prepend(element("label", {}, "Model ", select));
  return () => models[select.selectedIndex];
}

export function button(label, onclick, properties = {}) {
  return element("button", { type: "button", class: "quiet", ...properties, onclick }, label);
}

// Returns a button that copies the text that `read` returns. Plain http:// has no clipboard API.
export function copyButton(read, label = "Copy") {
  return button(label, async ({ currentTarget }) => {
    if (navigator.clipboard) await navigator.clipboard.writeText(read());
    else copySelected(read());
    currentTarget.textContent = "Copied";
    announce("Copied");
    setTimeout(() => { currentTarget.textContent = label; }, 1500);
  }, { class: "quiet copy" });
}

function copySelected(text) {
  const area = element("textarea", { class: "visually-hidden" }, text);
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

// Lets a textarea grow with its text, and Enter submit its form; Shift+Enter, and Enter in an input method,
// do not. With `withControl`, only Ctrl+Enter does. Returns a function that fits the height to the text.
export function setUpText(textarea, withControl = false) {
  const fit = () => {
    textarea.style.height = "auto";
    textarea.style.height = `${textarea.scrollHeight + 2}px`;
  };
  textarea.addEventListener("input", fit);
  textarea.closest("section").addEventListener("shown", fit);
  textarea.addEventListener("keydown", event => {
    const submits = withControl ? event.ctrlKey || event.metaKey : !event.shiftKey;
    if (event.key === "Enter" && submits && !event.isComposing) {
      event.preventDefault();
      textarea.form.requestSubmit();
    }
  });
  return fit;
}

// Lets the settings button of a form show and hide its settings.
export function setUpSettings(form) {
  const [opener, settings] = [find("[data-action=settings]", form), find(".settings", form)];
  opener.onclick = () => {
    settings.hidden = !settings.hidden;
    opener.setAttribute("aria-expanded", !settings.hidden);
  };
}

export function failure(error, retry = null) {
  return element("div", { class: "failure", role: "alert" },
    element("strong", {}, error.title ?? "Something went wrong"),
    element("p", {}, error.message), retry && button("Try again", retry));
}

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return `${value.toFixed(value < 10 ? 1 : 0)} s`;
}

// Returns minutes and seconds, such as 0:07.
export function clock(seconds) {
  return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
}
