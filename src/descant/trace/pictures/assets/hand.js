// How the tree is moved along and selected: by keys, by a click, by the wheel, by dragging.
{
  descant.Hand = class {
    constructor(view) {
      this.view = view;
      this.dragged = false;
      view.window.addEventListener("click", (event) => this.click(event));
      view.window.addEventListener("keydown", (event) => this.key(event));
      view.window.addEventListener("pointerdown", (event) => this.grab(event));
      view.window.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    }

    click(event) {
      const group = event.target.closest("[data-index]");
      if (group && !this.dragged) this.view.app.set({ node: Number(group.dataset.index) });
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const { app, nodes, plan, now } = this.view;
      const at = app.node ?? 0;
      const there = (one) => one !== undefined && one >= 0 && nodes.born[one] <= now;
      const beside = (by) => {
        const level = plan.byDepth[nodes.depth[at]].filter(there).sort((one, other) => plan.lane[one] - plan.lane[other]);
        return level[level.indexOf(at) + by];
      };
      const end = () => {
        let one = at;
        while (there(plan.main[one])) one = plan.main[one];
        return one;
      };
      const moves = {
        ArrowRight: () => (there(plan.main[at]) ? plan.main[at] : plan.children[at].find(there)),
        ArrowLeft: () => nodes.parent[at], ArrowDown: () => beside(1), ArrowUp: () => beside(-1),
        Home: () => 0, End: end, Enter: () => at, " ": () => at,
      };
      if (event.key === "+" || event.key === "=") this.view.zoom(this.view.scale * 1.3);
      else if (event.key === "-") this.view.zoom(this.view.scale / 1.3);
      else if (event.key === "Escape") app.set({ node: null });
      else if (moves[event.key]) {
        event.preventDefault();
        const to = moves[event.key]();
        if (there(to)) app.set({ node: to });
      }
    }

    wheel(event) {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.view.zoom(this.view.scale * Math.exp(-event.deltaY / 300), event.clientX - this.view.window.getBoundingClientRect().left);
    }

    // A mouse can drag the tree; a finger scrolls it as it does anything.
    grab(event) {
      this.dragged = false;
      if (event.pointerType !== "mouse" || event.button) return;
      const box = this.view.window;
      const [left, top] = [box.scrollLeft, box.scrollTop];
      const move = (to) => {
        const [x, y] = [to.clientX - event.clientX, to.clientY - event.clientY];
        if (Math.abs(x) + Math.abs(y) > 4) this.dragged = true;
        if (this.dragged) box.scrollTo(left - x, top - y);
      };
      addEventListener("pointermove", move);
      addEventListener("pointerup", () => removeEventListener("pointermove", move), { once: true });
    }
  };
}
