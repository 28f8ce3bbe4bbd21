// Tells the kernel what this view has painted and whether anyone can see it.

const AGAIN_MS = 1000; // what is said before JupyterLab has a subshell waits until the kernel has nothing to run

// The outermost widget around the dot: figures are looked at while the dot above them is scrolled away.
function whole(el) {
  let found = el;
  for (let at = el; at !== null; at = at.parentElement) {
    if (at.classList.contains("jupyter-widgets")) found = at;
  }
  return found;
}

function makeDot() {
  const dot = document.createElement("span");
  dot.setAttribute("aria-hidden", "true");
  dot.textContent = "●";
  dot.style.color = "#009E73";
  return dot;
}

function render({ model, el }) {
  const view = Math.random().toString(36).slice(2); // crypto.randomUUID is missing where a remote server has no https
  const dot = makeDot();
  const ending = new AbortController();
  let inWindow = false;
  let left = false; // a page that is being left is not hidden yet
  let painting = false;
  let turn = 0;

  const visible = () => inWindow && !left && !document.hidden;

  function say(more) {
    try {
      model.send({ view, turn: ++turn, visible: visible(), ...more });
    } catch {
      // the kernel has gone, and the page has said so itself
    }
  }

  function painted() {
    painting = false;
    dot.style.opacity = dot.style.opacity === "1" ? "0.4" : "1";
    say({ seen: model.get("sent") });
  }

  function acknowledge() {
    if (!visible()) return say({}); // an animation frame would not come before the page is shown again
    if (painting) return;
    painting = true;
    requestAnimationFrame(() => setTimeout(painted)); // the timer runs after the frame is painted
  }

  function leave() {
    left = true;
    say({});
  }

  function comeBack() {
    left = false;
    acknowledge();
  }

  const observer = new IntersectionObserver((entries) => {
    inWindow = entries.at(-1).isIntersecting;
    acknowledge();
  });

  function observe() {
    if (ending.signal.aborted) return;
    if (el.isConnected) observer.observe(whole(el));
    else requestAnimationFrame(observe); // a view is rendered before it is put where it belongs
  }

  el.append(dot);
  model.on("change:sent", acknowledge);
  document.addEventListener("visibilitychange", acknowledge, ending);
  window.addEventListener("pagehide", leave, ending);
  window.addEventListener("pageshow", comeBack, ending);
  observe();
  say({ hello: true });
  const again = setTimeout(() => say({ hello: true }), AGAIN_MS);

  return () => {
    clearTimeout(again);
    observer.disconnect();
    ending.abort();
    model.off("change:sent", acknowledge);
    leave();
  };
}

export default { render };
