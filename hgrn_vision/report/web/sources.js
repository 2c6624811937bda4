// Where images come from: files, drops, the clipboard, the camera.

for (const input of [$("file"), $("capture")]) {
  input.addEventListener("change", () => {
    if (input.files.length) take(input.files[0]);
    input.value = ""; // the same file may be chosen again
  });
}
$("choose").onclick = () => $("file").click();
$("stage").onclick = () => $("stage").dataset.shows === "nothing" && $("file").click();
$("retry").onclick = () => {
  $("problem").textContent = "";
  begin();
};

// the whole window accepts drops, so that the browser does not open a file that just missed the target
const over = (on) => $("stage").classList.toggle("over", on);
addEventListener("dragover", (event) => {
  event.preventDefault();
  over(true);
});
addEventListener("dragleave", (event) => event.relatedTarget ?? over(false));
addEventListener("drop", (event) => {
  event.preventDefault();
  over(false);
  takeFirst(event.dataTransfer.files, "That was not a file. Copy the image and paste it here, or save it first.");
});

addEventListener("paste", (event) => takeFirst(event.clipboardData.files, "The clipboard holds no image."));
$("paste").hidden = !navigator.clipboard?.read;
$("paste").onclick = async () => {
  try {
    const items = await navigator.clipboard.read().catch(() => {
      throw new Problem("The browser did not let the page read the clipboard. Press Ctrl+V (⌘V on a Mac) instead.");
    });
    const images = items.flatMap((item) => item.types.filter((type) => type.startsWith("image/")).map((type) => [item, type]));
    takeFirst(await Promise.all(images.slice(0, 1).map(([item, type]) => item.getType(type))), "The clipboard holds no image.");
  } catch (error) {
    complain(error);
  }
};

const REFUSALS = {
  NotAllowedError: "Access to the camera was denied. The browser's settings for this page can change that.",
  NotFoundError: "No camera was found.",
  NotReadableError: "The camera is in use by another program.",
};
let stream = null;
let facing = "environment";

function closeCamera() {
  stream?.getTracks().forEach((track) => track.stop());
  stream = null;
  $("video").srcObject = null;
  if ($("stage").dataset.shows === "camera") show($("image").src ? "image" : "nothing");
}

async function openCamera() {
  $("problem").textContent = "";
  // browsers give a page the camera only over HTTPS; phones still offer it in the file picker
  if (!navigator.mediaDevices) return $("capture").click();
  closeCamera();
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: facing, width: { ideal: 1280 } } });
    $("video").srcObject = stream;
    await $("video").play();
    show("camera");
    const devices = await navigator.mediaDevices.enumerateDevices();
    $("turn").hidden = devices.filter((device) => device.kind === "videoinput").length < 2;
    $("shoot").focus();
  } catch (error) {
    closeCamera();
    complain(new Problem(REFUSALS[error.name] ?? `The camera could not be used: ${error.message}.`));
  }
}

$("camera").onclick = openCamera;
$("turn").onclick = () => {
  facing = facing === "user" ? "environment" : "user";
  openCamera();
};
const cancel = () => {
  closeCamera();
  $("camera").focus();
};
$("stop").onclick = cancel;
addEventListener("keydown", (event) => event.key === "Escape" && stream && cancel());
$("shoot").onclick = () => {
  const video = $("video");
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
  canvas.getContext("2d").drawImage(video, 0, 0);
  canvas.toBlob((blob) => take(blob), "image/png");
  $("camera").focus();
};
