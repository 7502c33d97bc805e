// The microphone, as a WAV file of 16 kHz: every server reads that, whatever the browser records.

const RATE = 16000; // samples a second, what speech models take

// Begins; `tell` hears the time, as 0:07. The answer's `stop` gives the file.
export async function record(tell) {
  if (!navigator.mediaDevices) throw new Error("a browser records on https:// and on localhost only");
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true }).catch(error => {
    throw new Error(`the microphone cannot be used: ${error.message}`);
  });
  const recorder = new MediaRecorder(stream);
  const pieces = [];
  recorder.ondataavailable = event => pieces.push(event.data);
  const begun = performance.now();
  const clock = () => {
    const passed = Math.floor((performance.now() - begun) / 1000);
    tell(`${Math.floor(passed / 60)}:${String(passed % 60).padStart(2, "0")}`);
  };
  clock();
  const timer = setInterval(clock, 500);
  recorder.start();
  return {
    async stop() {
      clearInterval(timer);
      await new Promise(resolve => {
        recorder.onstop = resolve;
        recorder.stop();
      });
      stream.getTracks().forEach(track => track.stop());
      const samples = await decode(new Blob(pieces));
      return new File([wav(samples, RATE)], "recording.wav", { type: "audio/wav" });
    },
  };
}

// One channel of samples from -1 to 1, at RATE.
async function decode(blob) {
  const context = new AudioContext();
  const sound = await context.decodeAudioData(await blob.arrayBuffer());
  context.close();
  const offline = new OfflineAudioContext(1, Math.max(1, Math.ceil(sound.duration * RATE)), RATE);
  const source = new AudioBufferSourceNode(offline, { buffer: sound });
  source.connect(offline.destination);
  source.start();
  return (await offline.startRendering()).getChannelData(0);
}

// A WAV file of one channel, 16 bits a sample.
export function wav(samples, rate) {
  const bytes = new ArrayBuffer(44 + 2 * samples.length);
  const view = new DataView(bytes);
  const text = (at, letters) => [...letters].forEach((letter, n) => view.setUint8(at + n, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, 1, true); // whole numbers
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true); // bytes a second
  view.setUint16(32, 2, true); // bytes a sample
  view.setUint16(34, 16, true); // bits a sample
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, n) => {
    view.setInt16(44 + 2 * n, Math.max(-1, Math.min(1, sample)) * 32767, true);
  });
  return new Blob([bytes], { type: "audio/wav" });
}
