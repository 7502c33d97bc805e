// Create and find elements. Text is always text: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

export function find(selector, within = document) {
  return within.querySelector(selector);
}

// element("p", {class: "note", onclick: f}, "text", otherElement): null children are left out.
export function element(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svgElement(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (name.startsWith("on")) node[name] = value;
    else if (typeof value === "boolean") node.toggleAttribute(name, value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter(child => child !== null));
  return node;
}

// Announces a text to screen readers.
export function announce(text) {
  find("#announcer").textContent = text;
}

// Shows the elements that `work` returns in a section, or its error.
export async function showResult(section, work) {
  const output = find(".output", section);
  const button = find("[data-action=send]", section);
  button.disabled = true;
  output.setAttribute("aria-busy", true);
  try {
    output.replaceChildren(...await work());
  } catch (error) {
    output.replaceChildren(failure(error));
  } finally {
    button.disabled = false;
    output.removeAttribute("aria-busy");
  }
}

// Lets a textarea grow with its text; returns a function that fits it.
export function autoGrow(textarea) {
  const fit = () => {
    textarea.style.height = "auto";
    textarea.style.height = `${textarea.scrollHeight + 2}px`;
  };
  textarea.addEventListener("input", fit);
  return fit;
}

// Lets the settings button of a form show and hide its settings.
export function setUpSettings(form) {
  const button = find("[data-action=settings]", form);
  const settings = find(".settings", form);
  button.onclick = () => {
    settings.hidden = !settings.hidden;
    button.setAttribute("aria-expanded", !settings.hidden);
  };
}

// Enter submits a form; Shift+Enter, and Enter in an input method, do not. With `withControl`, only
// Ctrl+Enter does.
export function submitOnEnter(textarea, form, withControl = false) {
  textarea.addEventListener("keydown", event => {
    const submits = withControl ? event.ctrlKey || event.metaKey : !event.shiftKey;
    if (event.key === "Enter" && submits && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
}

export function failure(error, retry = null) {
  const button = retry && element("button", { type: "button", class: "quiet", onclick: retry }, "Try again");
  return element("div", { class: "failure", role: "alert" },
    element("strong", {}, error.title ?? "Something went wrong"),
    element("p", {}, error.message), button);
}

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return `${value.toFixed(value < 10 ? 1 : 0)} s`;
}
