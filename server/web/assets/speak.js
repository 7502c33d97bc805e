// A text spoken by /v1/audio/speech, as an audio player.

import { call } from "./api.js";
import { button, element, failure } from "./dom.js";
import { exchange } from "./exchange.js";

export const TASK = "text-to-audio";
const PATH = "v1/audio/speech";
const MAX_CHARS = 4096; // of a text
let speaker = null; // the model that speaks answers of chats

export function chooseSpeaker(models) {
  speaker = models.find(({ tasks }) => tasks?.includes(TASK)) ?? null;
}

// Returns the player and the request. `fields`: of the request, beside the model and the text.
export async function speak(model, text, fields = {}) {
  const body = { model, input: text, ...fields };
  const response = await call(PATH, { body });
  const file = await response.blob();
  const about = { "content-type": file.type, bytes: file.size };
  const player = element("audio", { controls: true, src: URL.createObjectURL(file) });
  return [player, exchange({ path: PATH, body }, () => about)];
}

// Returns a button that has a text spoken, and shows the player behind `place()`; null where no model speaks.
export function speakButton(textOf, place) {
  if (!speaker) return null;
  let shown = null;
  const press = async ({ currentTarget: pressed }) => {
    pressed.disabled = true;
    shown?.remove();
    try {
      [shown] = await speak(speaker.id, textOf().slice(0, MAX_CHARS));
      place().after(shown);
      await shown.play().catch(() => {}); // the browser may not allow it: the player is there
    } catch (error) {
      place().after(shown = failure(error));
    } finally {
      pressed.disabled = false;
    }
  };
  return button("Speak", press);
}
