// Names what ipywidgets leaves without one: sliders and the numbers beside them. Icons say nothing; their buttons do.

const SOON_MS = 200; // between changes in the page and names: it changes with every frame

function name(box) {
  for (const slider of box.querySelectorAll(".widget-slider")) {
    const label = slider.querySelector(".widget-label")?.textContent ?? "";
    slider.querySelector("[role=slider]")?.setAttribute("aria-label", label);
    const number = slider.querySelector(".widget-readout");
    number?.setAttribute("role", "textbox");
    number?.setAttribute("aria-label", `${label}, as a number`);
  }
  for (const icon of box.querySelectorAll(".widget-button i")) icon.setAttribute("aria-hidden", "true");
}

function render({ el }) {
  let timer = null;
  const observer = new MutationObserver(() => {
    timer ??= setTimeout(look, SOON_MS);
  });

  // A view is rendered before it is put where it belongs, before others beside it, and others may be rendered anew.
  function look() {
    timer = null;
    const box = el.closest(".widget-vbox");
    if (box === null) {
      timer = setTimeout(look, SOON_MS);
      return;
    }
    name(box);
    observer.observe(box, { childList: true, subtree: true });
  }

  look();
  return () => {
    clearTimeout(timer);
    observer.disconnect();
  };
}

export default { render };
