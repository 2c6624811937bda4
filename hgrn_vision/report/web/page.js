// What the page shows. This file, model.js and sources.js are one script in the page.

const $ = (id) => document.getElementById(id);
const site = JSON.parse($("site").textContent);
const FEW = 5;
const MANY = 20;
const LARGEST = 89478485; // pixels, the same limit as in Python

// An error whose message is a sentence for the user.
class Problem extends Error {}

// Without `seen`, only for screen readers: everyone else sees the answers themselves.
function say(text, seen = true) {
  $("status").textContent = text;
  $("status").classList.toggle("hidden", !seen);
}

function complain(error) {
  if (!(error instanceof Problem)) console.error(error);
  $("problem").textContent = error instanceof Problem ? error.message : `That did not work: ${error.message}.`;
}

function show(what) {
  $("stage").dataset.shows = what;
  $("sources").hidden = what === "camera";
  $("shutter").hidden = what !== "camera";
}

const percent = (p) => (p < 0.0005 ? "<0.1%" : `${(100 * p).toFixed(1)}%`);
const duration = (ms) => (ms < 1000 ? `${Math.max(1, Math.round(ms))} ms` : `${(ms / 1000).toFixed(1)} s`);

function row(name, probability) {
  const item = document.createElement("li");
  item.dataset.probability = probability;
  for (const [kind, text] of [["name", name], ["share", percent(probability)]]) {
    const part = document.createElement("span");
    part.className = kind;
    part.textContent = text;
    item.append(part);
  }
  const track = document.createElement("div");
  track.className = "track";
  track.setAttribute("aria-hidden", "true");
  const bar = track.appendChild(document.createElement("div"));
  bar.className = "bar";
  bar.style.width = `${100 * probability}%`;
  item.append(track);
  return item;
}

function showAnswers({ probabilities, preparing, computing }) {
  const order = Array.from(probabilities.keys()).sort((a, b) => probabilities[b] - probabilities[a]);
  const rows = order.slice(0, MANY).map((i) => row(labels[i], probabilities[i]));
  const list = $("answers");
  const more = $("more");
  const unfold = (open) => {
    list.replaceChildren(...rows.slice(0, open ? MANY : FEW));
    more.setAttribute("aria-expanded", open);
    more.textContent = open ? "Show fewer classes" : `Show ${rows.length - FEW} more classes`;
  };
  list.classList.remove("waiting");
  more.hidden = rows.length <= FEW;
  more.onclick = () => unfold(more.getAttribute("aria-expanded") === "false");
  unfold(false);
  const [first, second] = order.slice(0, 2).map((i) => `${labels[i]}, ${percent(probabilities[i])}`);
  say(`Most likely ${first}${second ? `; then ${second}` : ""}.`, false);
  $("time").textContent = `${duration(computing)} for the model, ${duration(preparing)} to prepare the image.`;
  // on a phone the answers are below the image
  $("time").scrollIntoView({ block: "nearest", behavior: "smooth" });
}

function clearAnswers() {
  $("answers").replaceChildren();
  $("more").hidden = true;
  $("time").textContent = "";
  say(document.body.dataset.ready === undefined ? "Loading the model…" : "Ready for an image.");
}

let turn = 0;

async function decode(file) {
  const name = file.name ? `“${file.name}”` : "The image";
  if (!file.size) throw new Problem(`${name} is empty.`);
  let bitmap;
  try {
    // colours as they are in the file, because Python ignores colour profiles too
    bitmap = await createImageBitmap(file, { colorSpaceConversion: "none", imageOrientation: "from-image" });
  } catch {
    const image = file.type.startsWith("image/");
    throw new Problem(
      image ? `${name} is damaged, or in a format that this browser cannot show.` : `${name} is not an image.`,
    );
  }
  if (bitmap.width * bitmap.height > LARGEST) throw new Problem(`${name} is too large: over 89 million pixels.`);
  return bitmap;
}

// The preview, with the part that the model sees bright.
function preview(file, { width, height }) {
  URL.revokeObjectURL($("image").src);
  $("image").src = URL.createObjectURL(file);
  $("image").style.setProperty("--aspect", width / height);
  $("image").classList.toggle("small", Math.max(width, height) < 320);
  $("image").classList.toggle("tiny", Math.max(width, height) < 96);
  const seen = site.spec.size / site.spec.resize;
  const side = Math.min(width, height) * seen;
  const place = { width: side / width, height: side / height };
  $("frame").style.width = `${100 * place.width}%`;
  $("frame").style.height = `${100 * place.height}%`;
  $("frame").style.left = `${50 * (1 - place.width)}%`;
  $("frame").style.top = `${50 * (1 - place.height)}%`;
  show("image");
}

async function take(file) {
  const mine = ++turn;
  const current = () => mine === turn;
  closeCamera();
  $("problem").textContent = "";
  $("answers").classList.add("waiting");
  try {
    const bitmap = await decode(file);
    if (!current()) return;
    preview(file, bitmap);
    if (document.body.dataset.ready !== undefined) say("Looking at the image…");
    // a failure to load has already been reported
    if (!(await loading.then(() => true, () => false)) || !current()) return;
    const answer = await ask("classify", { bitmap }, [bitmap]);
    if (current()) showAnswers(answer);
  } catch (error) {
    if (!current()) return;
    show("nothing");
    clearAnswers();
    complain(error);
  }
}

function takeFirst(files, otherwise) {
  if (files.length) take(files[0]);
  else complain(new Problem(otherwise));
}
