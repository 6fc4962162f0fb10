const short=v=>Math.abs(v)>=1e9?(v/1e9).toPrecision(4)+' G':Math.abs(v)>=1e6?(v/1e6).toPrecision(4)+' M':
  Math.abs(v)>=1e4?Math.round(v).toLocaleString('en'):String(+v.toPrecision(4));
const node=(kind,parent)=>{const made=document.createElement('div');made.className=kind;parent.append(made);
  return made};
for(const plot of document.querySelectorAll('.plot')){
  const data=JSON.parse(plot.dataset.chart);let tip,rule;
  const clear=()=>{tip&&tip.remove();rule&&rule.remove();tip=rule=null};
  plot.addEventListener('pointerleave',clear);
  plot.addEventListener('pointermove',event=>{
    const box=plot.getBoundingClientRect(),part=Math.min(1,Math.max(0,(event.clientX-box.left)/box.width));
    let x=data.x[0]+part*(data.x[1]-data.x[0]);if(data.labels)x=Math.min(data.labels.length-1,Math.floor(x));
    tip=tip||node('tip',plot);rule=rule||node('rule',plot);rule.style.left=100*part+'%';
    const near=one=>one.p.reduce((a,b)=>Math.abs(b[0]-x)<Math.abs(a[0]-x)?b:a);
    tip.textContent=data.labels?data.labels[x]:data.name+' '+short(near(data.series[0])[0]);
    data.series.forEach((one,place)=>{
      const point=near(one),below=data.series[place+1];
      if(one.look=='dots'&&Math.abs(point[0]-x)>.02*(data.x[1]-data.x[0]))return;
      const row=node('',tip),mark=document.createElement('b');mark.style.background='var(--'+one.c+')';
      const value=point[1]-(one.look=='area'&&below&&below.look=='area'?near(below)[1]:0);
      row.append(mark,one.n+'  '+short(value))});
    const left=part<.5;tip.style.left=left?'calc('+100*part+'% + 12px)':'auto';
    tip.style.right=left?'auto':'calc('+100*(1-part)+'% + 12px)'});
}
