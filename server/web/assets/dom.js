// Making and finding elements. Text is always text: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";

export function find(selector, within = document) {
  return within.querySelector(selector);
}

// element("p", {class: "note", onclick: f}, "text", otherElement): null children are left out.
export function element(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function drawing(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(made, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("--")) made.style.setProperty(name, value);
    else if (name.startsWith("on")) made[name] = value;
    else if (typeof value === "boolean") made.toggleAttribute(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter(child => child !== null));
  return made;
}

// Tell those who listen rather than look.
export function announce(text) {
  find("#announcer").textContent = text;
}

// Does a section's work, and shows what comes of it: elements, or what went wrong.
export async function showing(section, work) {
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

// Grow with what is typed.
export function growing(textarea) {
  const fit = () => {
    textarea.style.height = "auto";
    textarea.style.height = `${textarea.scrollHeight + 2}px`;
  };
  textarea.addEventListener("input", fit);
  return fit;
}

// A button that shows and hides a part of its form.
export function unfolding(form) {
  const button = find("[data-action=settings]", form);
  const part = find(".settings", form);
  button.onclick = () => {
    part.hidden = !part.hidden;
    button.setAttribute("aria-expanded", !part.hidden);
  };
}

// Enter sends a form; Shift+Enter, and Enter that ends a composition of letters, do not.
export function sendingOnEnter(textarea, form, withControl = false) {
  textarea.addEventListener("keydown", event => {
    const meant = withControl ? event.ctrlKey || event.metaKey : !event.shiftKey;
    if (event.key === "Enter" && meant && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
}

export function failure(error, retry = null) {
  const again = retry && element("button", { type: "button", class: "quiet", onclick: retry }, "Try again");
  return element("div", { class: "failure", role: "alert" },
    element("strong", {}, error.title ?? "It did not work"),
    element("p", {}, error.message), again);
}

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 0.0095) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return `${value.toFixed(value < 10 ? 1 : 0)} s`;
}
